"""An agent over a folder of notes that people keep editing: what changed is computed, the rest is reused.

    python examples/agents/research_notes.py FOLDER "a question"

Without arguments it writes a few notes into a temporary folder, asks, changes the folder, and asks again. It
runs on a demo model, on a CPU, without a network.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rolling_kv import RollingSession

NOTES = {
    "boiler.txt": "The boiler in Granby was tested at 145 bar by Ada Holm.",
    "pump.txt": "The pump in Eastvale moves 730 litres a minute and was fitted by Ben Ruiz.",
    "turbine.txt": "The turbine in Dunmore turns 3600 times a minute and was balanced by Cleo Marsh.",
    "valve.txt": "The valve in Hollis opens at 88 degrees and was made by Dov Stern.",
}
QUESTION = "At how many bar was the boiler in Granby tested?"


def synchronise(session: RollingSession, folder: Path) -> None:
    """Appends new files to the window, replaces those that changed, and evicts those that are gone."""
    held = {document.id: document.text for document in session.documents}
    found = {path.name: path.read_text(encoding="utf-8").strip() for path in sorted(folder.glob("*.txt"))}
    for name in held.keys() - found.keys():
        print(f"- {name}: {session.evict(name).computed} tokens computed")
    for name, text in found.items():
        if name not in held:
            print(f"+ {name}: {session.append(text, id=name).computed} tokens computed")
        elif text != held[name]:
            print(f"~ {name}: {session.replace(name, text).computed} tokens computed")


def ask(session: RollingSession, question: str) -> None:
    answer = session.ask(f"Question: {question}\nAnswer:", max_new_tokens=24, stop=["\n"])
    usage = answer.usage
    kept = usage.prefix + usage.reused
    print(f"{question}\n  {answer.text.strip()}")
    print(f"  {kept} of {usage.prompt_tokens} prompt tokens were not computed again")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of .txt files")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", default="demo", help="a folder, a hub id or a demo model")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as temporary,
        RollingSession.open(model=given.model, instruction="Answer from the notes.") as session,
    ):
        folder = given.folder or Path(temporary)
        if given.folder is None:
            for name, text in NOTES.items():
                (folder / name).write_text(text, encoding="utf-8")
        synchronise(session, folder)
        ask(session, given.question)
        if given.folder is None:
            print("The boiler is tested again, the valve is gone, and a fan is new.")
            (folder / "boiler.txt").write_text(NOTES["boiler.txt"].replace("145", "162"), encoding="utf-8")
            (folder / "valve.txt").unlink()
            (folder / "fan.txt").write_text("The fan in Arlen was cleaned by Eve Tamm.", encoding="utf-8")
            synchronise(session, folder)
            ask(session, given.question)


if __name__ == "__main__":
    main()
