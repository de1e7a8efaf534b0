"""Asks a rank for a fault, see `actors.faults`."""

from pathlib import Path


class Faults:
    """The folder of `debug.fault_dir`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ask(self, place: str, fault: str) -> None:
        """`fault` at `<stage>.<rank>`. A rank may look at any moment: the file appears whole."""
        unseen = self.folder / f".{place}"
        unseen.write_text(fault)
        unseen.rename(self.folder / place)

    def take_back(self, place: str) -> None:
        (self.folder / place).unlink(missing_ok=True)

    def left(self) -> list[Path]:
        """Those that no rank has come to."""
        return list(self.folder.iterdir())
