"""Location of a store: a file, or the URL of a database, whose password is never displayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from pipollux_utils.paths import expanded

from .errors import StoreError

_DRIVERS = {
    "sqlite": "sqlite+pysqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


@dataclass(frozen=True)
class Location:
    """The location of a database for a store.

    Example:
        >>> print(Location.of("postgresql://pipollux:secret@db.example/jobs"))
        postgresql://pipollux@db.example/jobs
        >>> print(Location.of("/var/lib/pipollux.db"))
        /var/lib/pipollux.db
    """

    url: URL

    @classmethod
    def of(cls, given: Path | str) -> Location:
        """Return the location for a path or a URL; a text without ``://`` is a path.

        `StoreError`: the URL is invalid, or its database is not supported.
        """
        if isinstance(given, Path) or "://" not in given:
            return cls(_sqlite(Path(given)))
        try:
            url = make_url(given)
        except (ArgumentError, ValueError):
            raise StoreError(
                "store: the value is not the URL of a database; "
                "write postgresql://USER@HOST/DATABASE or sqlite:////PATH/TO/FILE"
            ) from None  # the cause would repeat the URL, with its password
        driver = _DRIVERS.get(url.drivername)
        if driver is None:
            raise StoreError(
                f"store: {url.drivername!r} databases are not supported; "
                "allowed are postgresql://USER@HOST/DATABASE and sqlite:////PATH/TO/FILE"
            )
        if not driver.startswith("sqlite"):
            return cls(url.set(drivername=driver))
        if url.database in (None, "", ":memory:") or url.query or url.host:
            raise StoreError(
                f"store: {url.drivername}:// needs the path of a file, and nothing else; "
                "write sqlite:////PATH/TO/FILE"
            )
        return cls(_sqlite(Path(str(url.database))))

    @property
    def file(self) -> Path | None:
        """The file of an SQLite database; None for any other."""
        if self.url.drivername != "sqlite+pysqlite":
            return None
        return Path(str(self.url.database))

    def secret(self) -> str:
        """Return the URL with its password."""
        return self.url.render_as_string(hide_password=False)

    def __str__(self) -> str:
        if self.file is not None:
            return str(self.file)
        hosts = self.url.query.get("host", "")
        host = self.url.host or (hosts if isinstance(hosts, str) else ",".join(hosts))
        user = f"{self.url.username}@" if self.url.username else ""
        port = f":{self.url.port}" if self.url.port else ""
        return f"postgresql://{user}{host}{port}/{self.url.database or ''}"


def _sqlite(path: Path) -> URL:
    return URL.create("sqlite+pysqlite", database=str(expanded(path).absolute()))
