"""Which models do the GPU checks serve, and where are they? With --tiny small ones of the same form."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("text_recognition", "imdb_transformer", "resnet50")
ROOT = Path(__file__).parents[3]


@dataclass(kw_only=True)
class Asked:
    """What a section is to do; what it finds it keeps at once, so that one that is stopped has still said something."""

    device: str
    tiny: bool
    out: str
    budget_s: float
    begun_s: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        """Write `rows` down under a name."""
        self.found[name] = value
        Path(self.out).write_text(json.dumps({"rows": self.found}))

    @property
    def scratch(self) -> Path:
        return Path(self.out).parent

    @property
    def left_s(self) -> float:
        return self.begun_s + self.budget_s - 3.0 - time.monotonic()


def provenance(asked: Asked) -> None:
    """Where and with what: batchtune's own account, and PyTorch's of the card."""
    import torch

    from batchtune.provenance import collect

    card: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": asked.device}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        card |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
            "tf32_convolutions": torch.backends.cudnn.allow_tf32,
            "tf32_products": torch.backends.cuda.matmul.allow_tf32,
        }
    asked.keep("card", card)
    asked.keep("tiny", asked.tiny)
    asked.keep("provenance", collect(1, directory=ROOT))


def export_all(asked: Asked) -> None:
    """Export the models side by side."""
    started_s = time.monotonic()
    running = {
        name: subprocess.Popen(_export(asked, name), stdout=subprocess.PIPE, text=True) for name in NAMES
    }
    for name, process in running.items():
        told, _ = process.communicate(timeout=max(asked.left_s, 1.0))
        if process.returncode:
            raise SystemExit(f"{name}: exporting failed with {process.returncode}")
        path = Path(told.strip().splitlines()[-1])
        megabytes = (path / "1" / "model.pt2").stat().st_size / 1e6
        asked.keep(name, {"seconds": time.monotonic() - started_s, "megabytes": megabytes})


def base_path(asked: Asked, name: str) -> Path:
    """Where export_all has put the model, or will: the same with either size."""
    if asked.tiny:
        return asked.scratch / "tiny" / name
    from batchtune.sample_models import cache_path

    return cache_path(name, "torch")


def settings(asked: Asked, name: str) -> list[str]:
    """What to change in a scenario so that it serves this model on this device."""
    changed = [f"target.device={asked.device}"]
    if asked.tiny:
        changed += [f"target.model={base_path(asked, name)}", "target.framework=null"]
    return changed


def _export(asked: Asked, name: str) -> list[str]:
    if not asked.tiny:
        return [sys.executable, "-m", "batchtune.sample_models", name, "--framework", "torch"]
    return [sys.executable, __file__, name, str(base_path(asked, name))]


def write_tiny(name: str, path: Path) -> None:
    import torch

    from batchtune.sample_models.torch_layers import TextRecognition, resnet50
    from batchtune.sample_models.torch_models import torch_model, write_program

    torch.manual_seed(1)
    small = {
        "imdb_transformer": lambda: torch_model("imdb_transformer"),
        "text_recognition": lambda: TextRecognition(channels=16),
        "resnet50": lambda: resnet50(((4, 1), (8, 1), (8, 1), (8, 1))),
    }
    write_program(name, path / "1", module=small[name]().eval())


if __name__ == "__main__":
    write_tiny(sys.argv[1], Path(sys.argv[2]))
    print(sys.argv[2])
