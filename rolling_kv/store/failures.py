"""What the system and SQLite raise, as errors that say what to do."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from rolling_kv.errors import (
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
)


@contextmanager
def translated_errors(folder: Path) -> Iterator[None]:
    """Turns what the system and SQLite raise into errors of the store in `folder`."""
    try:
        yield
    except Timeout as error:
        raise _locked(folder, "its opening lock") from error
    except OSError as error:
        raise _from_os_error(folder, error) from error
    except sqlite3.Error as error:
        raise _from_sqlite_error(folder, error) from error


def _locked(folder: Path, what: str) -> StoreLockedError:
    return StoreLockedError(
        f"Another process holds the index of the store in {folder} ({what}). "
        "Wait for it, end it, or pass another store= folder."
    )


def _from_os_error(folder: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(
            f"No space is left for the store in {folder}. What it holds is unharmed. "
            "Free some space, or pass store= a folder on a larger disk."
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreReadOnlyError(
            f"The store folder {folder} cannot be written ({error.strerror}). "
            "Pass store= a folder you may write to, or store=None to keep KV in memory."
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return StoreFormatError(f"{folder} is not a folder. Pass store= a folder; it is made when missing.")
    return StoreError(f"The store in {folder} failed: {error}. What it holds is unharmed; try again.")


def _from_sqlite_error(folder: Path, error: sqlite3.Error) -> StoreError:
    text = str(error)
    if "locked" in text or "busy" in text:
        return _locked(folder, text)
    if "readonly" in text or "unable to open" in text:
        return StoreReadOnlyError(
            f"The index of the store in {folder} cannot be written ({text}). "
            "Pass store= a folder you may write to, or store=None to keep KV in memory."
        )
    if "full" in text:
        return StoreFullError(f"No space is left for the index of the store in {folder}. Free some space.")
    if "not a database" in text or "malformed" in text:
        return StoreFormatError(
            f"The index of the store in {folder} is damaged ({text}). "
            "Move index.sqlite away and run `rolling-kv store rebuild` on the folder."
        )
    return StoreError(f"The index of the store in {folder} failed: {text}.")
