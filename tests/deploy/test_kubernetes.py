"""The manifests against the API's schemas: those of Kubernetes from kubernetes-validate, and those of custom resources in
custom_resources.json, which has the fields that such a manifest may need, with their types, as the projects' API references say."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
CUSTOM = json.loads(Path(__file__).with_name("custom_resources.json").read_text())
STRING = {"type": "string", "minLength": 1}

Document = dict[str, Any]


def documents() -> list[Document]:
    return [document for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def of_kind(kind: str) -> Document:
    return copy.deepcopy(next(document for document in documents() if document["kind"] == kind))


def validate(document: Document) -> None:
    """Raises ValidationError, also for a field that the schema does not have."""
    kind = document["kind"]
    if kind not in CUSTOM:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        return
    custom = CUSTOM[kind]
    properties = {"apiVersion": {"const": custom["apiVersion"]}, "kind": {"const": kind}, "metadata": {"type": "object"}}
    if "spec" in custom:
        named = {"type": "object", "required": ["name"], "properties": {"name": STRING}}
        properties |= {"metadata": named, "spec": custom["spec"]}
    else:  # a file of kustomize's own, which no cluster gets
        properties |= {"resources": {"type": "array", "items": {"enum": [path.name for path in FOLDER.glob("*.yaml")]}}}
    required = ["apiVersion", "kind", *({"metadata", "spec"} if "spec" in custom else {"resources"})]
    jsonschema.validate(document, {"properties": properties, "required": required, "additionalProperties": False})
    for name, template in document.get("spec", {}).get("leaderWorkerTemplate", {}).items():
        if name.endswith("Template"):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template}
            kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("document", documents(), ids=lambda document: document["kind"])
def test_manifests_follow_the_api(document: Document) -> None:
    validate(document)


BROKEN = [  # kind, path, a value that the API refuses
    ("Deployment", "spec.template.spec.containers.0.readinessprobe", {"httpGet": {"path": "/health", "port": "http"}}),
    ("Deployment", "spec.template.spec.containers.0.ports.0.containerPort", "8000"),
    ("Deployment", "spec.template.spec.containers.0.lifecycle.preStop.sleep", {}),
    ("Service", "spec.ports.0.port", "http"),
    ("NetworkPolicy", "spec.ingress.0.from.0.podSelectors", {}),
    ("NetworkPolicy", "apiVersion", "networking.k8s.io/v0"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.size", "2"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.restartPolicy", "RecreateGroup"),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.leaderTemplate.spec.containers.0.commands", ["torchrun"]),
    ("LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate.spec.terminationGracePeriodSeconds", "150"),
    ("LeaderWorkerSet", "spec.size", 2),
    ("InferencePool", "spec.extensionRef", {"name": "rung-epp"}),
    ("InferencePool", "spec.targetPorts.0.number", 80000),
    ("InferencePool", "spec.endpointPickerRef", {"name": "rung-epp"}),
    ("InferencePool", "spec.endpointPickerRef.portNumber", 9002),
    ("InferencePool", "apiVersion", "inference.networking.x-k8s.io/v1alpha2"),
    ("HTTPRoute", "spec.rules.0.timeouts.request", "10 minutes"),
    ("HTTPRoute", "spec.rules.0.backendRefs.0.name", None),
    ("PodMonitor", "spec.podMetricsEndpoints.0.port", 8000),
    ("PodMonitor", "spec.endpoints", [{"port": "http"}]),
    ("Kustomization", "resources", ["deploy.yaml"]),
]


@pytest.mark.parametrize(("kind", "path", "value"), BROKEN, ids=[f"{kind}-{path}" for kind, path, _ in BROKEN])
def test_a_broken_manifest_is_refused(kind: str, path: str, value: Any) -> None:
    document = of_kind(kind)
    *above, name = path.split(".")
    part: Any = document
    for key in above:
        part = part[int(key) if key.isdigit() else key]
    part[name] = value
    with pytest.raises(
        (jsonschema.ValidationError, kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
    ):
        validate(document)
