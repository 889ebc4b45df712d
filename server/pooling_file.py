"""Read how sentence-transformers pools a checkpoint's hidden states."""

from pathlib import Path

from engine.protocol import Pooling
from errors import UserError
from files import CONFIG_BYTES, model_folder, read_json
from server.logs import log

POOLINGS: dict[str, Pooling] = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
POOLING_FILE = Path("1_Pooling") / "config.json"  # of sentence-transformers


def checkpoint_pooling(model: str) -> Pooling:
    """What the checkpoint at path `model` was trained for, as sentence-transformers writes it; the mean if it does not say so."""
    file = model_folder(model) / POOLING_FILE
    try:
        config = read_json(file, CONFIG_BYTES)
        modes = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True and name != "include_prompt"]
        return POOLINGS[config.get("pooling_mode") or (*modes, "mean")[0]]
    except FileNotFoundError:
        return "mean"
    except (UserError, KeyError, TypeError) as e:  # KeyError, TypeError: a pooling that is not known
        log.warning("%s is not used, and embeddings are means: %r (--embedding-pooling says which)", file, e)
        return "mean"
