"""The hosts that notifications may be sent to.

The scheduler's host makes these requests, and may reach services that users may not. So only
addresses of the public internet are allowed by default, and others by name or network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from typing import Self, TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

PUBLIC = "public"
"""All addresses of the public internet."""
NONE = "none"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class HostRules:
    """The allowed hosts.

    Example:
        >>> rules = HostRules.parse(["10.1.0.0/16", "*.example.org"])
        >>> rules.allows_address("10.1.2.3"), rules.names("hooks.example.org")
        (True, True)
        >>> HostRules.parse(["public"]).allows_address("127.0.0.1")
        False
    """

    def __init__(self, public: bool, networks: Collection[Network], names: Collection[str]) -> None:
        self._public, self._networks, self._names = public, tuple(networks), tuple(names)

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """Return the rules of `serve --notify-host`; ValueError: an entry is none."""
        public, networks, names = False, [], []
        for entry in entries:
            text = entry.strip().lower().rstrip(".")
            if text in (PUBLIC, NONE):
                public = public or text == PUBLIC
                continue
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError:
                stem = text.removeprefix("*.").replace("-", "").replace("_", "").replace(".", "")
                if not (stem.isascii() and stem.isalnum()) or "/" in text:
                    raise ValueError(
                        f"{entry!r} is no host; give a name such as hooks.example.org or "
                        "*.example.org, an address, a network such as 10.1.0.0/16, "
                        f"'{PUBLIC}' or '{NONE}'"
                    ) from None
                names.append(text)
        return cls(public, networks, names)

    @property
    def empty(self) -> bool:
        """Whether no host is allowed."""
        return not (self._public or self._networks or self._names)

    def names(self, host: str) -> bool:
        """Return whether a host is allowed by its name, wherever that leads."""
        host = host.lower().rstrip(".")
        return any(
            host.endswith(name[1:]) if name.startswith("*.") else host == name
            for name in self._names
        )

    def listed(self, host: str) -> bool:
        """Return whether a host, or its literal address, is listed itself."""
        address = parse_address(host)
        if address is None:
            return self.names(host)
        return any(address in network for network in self._networks)

    def allows_address(self, text: str) -> bool:
        """Return whether a literal address is allowed."""
        address = parse_address(text)
        if address is None:
            return False
        if any(address in network for network in self._networks):
            return True
        return self._public and is_public(address)

    def why_not(self, host: str) -> str | None:
        """Explain why nothing is sent to a host; None: it may be allowed when it is resolved."""
        if self.empty:
            return "this scheduler sends no notifications: see serve --notify-host"
        if parse_address(host) is not None:
            allowed = self.allows_address(host)
        else:
            local = host.lower().rstrip(".")
            local_name = local == "localhost" or local.endswith(".localhost")
            # A network may hold any host; that is known once the name is resolved.
            networks = any(network.num_addresses > 1 for network in self._networks)
            may = networks or (self._public and not local_name)
            allowed = self.names(host) or may
        if allowed:
            return None
        return f"{host} is not a host that an admin allows with serve --notify-host"


def parse_address(text: str) -> Address | None:
    """Return a literal address, the embedded one of IPv4 in IPv6; None: it is none."""
    try:
        address = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Return whether an address is one of the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.sixtofour is not None:
            return is_public(address.sixtofour)
        if address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast
