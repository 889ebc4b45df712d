"""The server's settings: which source takes precedence, and how an invalid setting is reported."""

from dataclasses import fields
from pathlib import Path

import pytest

from errors import UserError
from server.settings import NEEDS, Settings, load_settings


def test_help_says_the_defaults() -> None:
    for one in fields(Settings):
        if one.metadata and isinstance(one.default, int | float | str) and not isinstance(one.default, bool):
            assert f"(default: {str(one.default).removesuffix('.0')}" in one.metadata["help"], one.name


def test_settings_precedence(tmp_path: Path) -> None:
    file = tmp_path / "rung.toml"
    file.write_text('model = "m"\nport = 1\nmax-num-seqs = 2\nmax_queue = 3\napi-key = ["first secret", "b"]\ncompile = true\n')
    environ = {"RUNG_PORT": "10", "RUNG_MAX_NUM_SEQS": "20", "RUNG_CORS_ORIGIN": "x, y"}
    settings = load_settings(["--config", str(file), "--port", "100"], environ)
    assert (settings.port, settings.max_num_seqs, settings.max_queue) == (100, 20, 3)
    assert settings.api_key == ("first secret", "b") and settings.cors_origin == ("x", "y") and settings.compile
    assert "first secret" not in repr(settings) and "api_key=" not in repr(settings)
    settings = load_settings(["--model", "m"], {"RUNG_TRUSTED_PROXY": "127.0.0.1, 10.0.0.0/8"})
    assert settings.trusted_proxy == ("127.0.0.1", "10.0.0.0/8")
    keys = tmp_path / "keys"
    keys.write_text("# comment\n\nsecret\n")
    settings = load_settings(["--model", "m", "--api-key-file", str(keys), "--kv-memory", "1.5G"], {})
    assert settings.api_key == ("secret",) and settings.kv_memory == 1.5 * 2**30
    for more, waiting in (([], 1024 - 128), (["--fairness", "off"], 1024), (["--max-queue-per-client", "5"], 5)):
        assert load_settings(["--model", "m", *more], {}).client_queue == waiting


def test_a_model_is_called_like_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "model.pth").touch()
    monkeypatch.chdir(folder)
    for model in (str(folder), str(folder / "model.pth"), "model.pth", "."):
        assert Settings(model=model).model_names == ("llama",)
    assert Settings(model="llama-3-70b:16").model_names == ("llama-3-70b:16",)


@pytest.mark.parametrize(
    ("argv", "environ", "file", "message"),
    [
        ([], {}, "", "no model"),
        (["--model", "m", "--por", "1"], {}, "", "--por"),
        (["--model", "m", "--request-timeout", "abc"], {}, "", "--request-timeout: 'abc' is no number above 0"),
        (["--model", "m"], {"RUNG_HANG_SECONDS": "-1"}, "", "--hang-seconds: '-1' is no number of at least 0"),
        (["--model", "m", "--port", "x"], {}, "", "--port"),
        (["--model", "m"], {"RUNG_PORT": "70000"}, "", "RUNG_PORT"),
        (["--model", "m"], {}, "prot = 1", "prot"),
        (["--model", "m"], {}, "port = 'x'", "port in"),
        (["--model", "m"], {}, "port = [", "cannot be parsed"),
        (["--model", "m"], {"RUNG_COMPILE": "maybe"}, "", "RUNG_COMPILE"),
        (["--model", "m", "--api-key", ""], {}, "", "api-key"),
        (["--model", "m", "--api-key", "k weight=0"], {}, "", "weight of an API key must be from 1 to 1000"),
        (["--model", "m", "--max-num-seqs", "65537"], {}, "", "not from 1 to 65536"),
        (["--model", "m"], {"RUNG_MAX_BATCH_TOKENS": "1048577"}, "", "not from 1 to 1048576"),
        (["--model", "m", "--ngram-prompts", "9"], {"RUNG_SPECULATE": "off"}, "", "add --speculate ngram"),
        (
            ["--model", "m", "--draft-tokens", "5"],
            {},
            "",
            "--draft-tokens has no effect here; add --speculate ngram, or leave it out",
        ),
        (["--model", "m", "--max-loras", "2"], {}, "", "--max-loras has no .* add --lora NAME=DIR or --allow-lora-updates"),
        (["--model", "m", "--lora", "a=/a"], {"RUNG_LORA_ROOT": "/"}, "", "--lora-root has no .* add --allow-lora-updates"),
        (["--model", "m"], {}, "protect-metrics = true", "--protect-metrics has no .* add --api-key or --api-key-file FILE"),
        (["--model", "m", "--journal-hours", "1"], {}, "", "--journal-hours has no .* add --journal FILE"),
        (["--model", "m", "--ssl-keyfile", "k"], {}, "", "--ssl-keyfile has no .* add --ssl-certfile FILE"),
        (["--model", "m", "--uds", "s", "--port", "1"], {}, "", "--uds is listened on instead of --host and --port"),
        (["--model", "m", "--uds", "s"], {"RUNG_HOST": "::1"}, "", "--uds is listened on instead of --host and --port"),
        (["--model", "m", "--override-generation-config", "{"], {}, "", "override-generation-config: it is no JSON object"),
        (["--model", "m", "--override-generation-config", "[]"], {}, "", "it is no JSON object such as"),
        (
            ["--model", "m"],
            {},
            'override-generation-config = \'{"do_sample": true, "top_q": 1}\'',
            "it has 'do_sample, top_q', but",
        ),
        (["--model", "m"], {"RUNG_OVERRIDE_GENERATION_CONFIG": '{"top_p": 2}'}, "", "RUNG_OVERRIDE.*top_p must be above 0"),
        (["--model", "m", "--override-generation-config", '{"temperature": "hot"}'], {}, "", "temperature"),
        (["--model", "m", "--trusted-proxy", "proxy.example"], {}, "", "trusted-proxy"),
        (["--model", "m"], {"RUNG_TRUSTED_PROXY": "10.0.0.1/8"}, "", "RUNG_TRUSTED_PROXY.*host bits"),
    ],
)
def test_bad_settings(tmp_path: Path, argv: list[str], environ: dict[str, str], file: str, message: str) -> None:
    if file:
        (tmp_path / "c.toml").write_text(file)
        argv = [*argv, "--config", str(tmp_path / "c.toml")]
    with pytest.raises(UserError, match=message) as caught:
        load_settings(argv, environ)
    assert "\n" not in str(caught.value)


def test_flags_that_need_others_are_taken_with_them() -> None:
    for argv in (
        ["--draft-tokens", "5", "--ngram-prompts", "9", "--speculate", "ngram"],
        ["--max-loras", "2", "--max-lora-rank", "8", "--lora", "a=/a"],
        ["--protect-metrics", "--api-key", "k"],
        ["--journal-hours", "1", "--journal", "file"],
        ["--no-protect-metrics", "--draft-tokens", "7", "--ngram-prompts", "0"],  # what is the default needs nothing
    ):
        assert load_settings(["--model", "m", *argv], {}).model == "m"
    assert all({*names, *needed} <= {one.name for one in fields(Settings)} for names, needed in NEEDS.items())
