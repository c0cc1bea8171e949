"""Validation of pod templates: Kubernetes' Pod Security Standards, and further rules.

Pods of a job are created with the rights of the scheduler. So its template is checked against the
administrator's level, like a pod that the user creates in a namespace with that level:
https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipollux_sched.utils.yaml_file import SpecError

from . import names
from .options import KubernetesOptions

_CONTAINERS = ("initContainers", "containers", "ephemeralContainers")
_BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
_RESTRICTED_CAPABILITIES = {"NET_BIND_SERVICE"}
_RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}
_SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    *("net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range"),
    *("net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time"),
    *("net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem"),
}
_SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_PROFILES = {"RuntimeDefault", "Localhost"}
_APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
_HANDLERS = ("livenessProbe", "readinessProbe", "startupProbe")


class Problem(NamedTuple):
    """A part of a template that is not allowed."""

    path: str
    """Its path, such as ``spec.volumes[0].hostPath``."""
    text: str


def check_template(job: str, template: Any, options: KubernetesOptions) -> None:
    """Reject a job's template that has more rights than allowed, with a sentence per problem."""
    found = template_problems(template, options)
    if found:
        raise SpecError(*(f"job '{job}': template: {path}: {text}" for path, text in found))


def template_problems(template: Any, options: KubernetesOptions) -> list[Problem]:
    """Return the parts of a PodTemplateSpec that are not allowed; empty: it may be used."""
    if problem := _malformed(template):
        return [problem]
    spec, level = template.get("spec") or {}, options.pod_security
    found = list(_own_secrets(template))
    if level == "privileged":
        return found
    annotations = (template.get("metadata") or {}).get("annotations")
    found += _namespace_rules(spec, options)
    standard = list(_baseline(spec, annotations if isinstance(annotations, Mapping) else {}))
    if level == "restricted":
        standard += _restricted(spec)
    unique = dict.fromkeys(standard)  # report problems of both levels once
    return found + [
        Problem(path, f"{text}, as this scheduler runs with --pod-security {level}")
        for path, text in unique
    ]


def make_restricted(spec: dict[str, Any]) -> None:
    """Fill in the fields that the level `restricted` requires."""
    context = spec["securityContext"] = dict(spec.get("securityContext") or {})
    context.setdefault("runAsNonRoot", True)
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    for kind in _CONTAINERS:
        for container in spec.get(kind) or ():
            own = container["securityContext"] = dict(container.get("securityContext") or {})
            own.setdefault("allowPrivilegeEscalation", False)
            own["capabilities"] = {"drop": ["ALL"], **(own.get("capabilities") or {})}


def _malformed(template: Any) -> Problem | None:
    """Return why a template cannot be parsed: it comes unchecked from its user."""
    if not isinstance(template, Mapping):
        return Problem("it", "must be a PodTemplateSpec, as in {spec: {containers: [...]}}")
    for field in ("metadata", "spec"):
        if not isinstance(template.get(field) or {}, Mapping):
            return Problem(field, "must be a mapping")
    spec = template.get("spec") or {}
    for field in (*_CONTAINERS, "volumes", "tolerations"):
        entries = spec.get(field) or []
        if not isinstance(entries, list) or not all(isinstance(one, Mapping) for one in entries):
            return Problem(f"spec.{field}", "must be a list of mappings")
    for path, container in _containers(spec):
        for field in ("env", "volumeMounts"):
            entries = container.get(field) or []
            if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
                return Problem(f"{path}.{field}", "must be a list of mappings")
        for field in ("resources", "securityContext"):
            if not isinstance(container.get(field) or {}, Mapping):
                return Problem(f"{path}.{field}", "must be a mapping")
    for field in ("nodeSelector", "securityContext"):
        if not isinstance(spec.get(field) or {}, Mapping):
            return Problem(f"spec.{field}", "must be a mapping")
    return None


def _own_secrets(value: Any, path: str = "") -> Iterator[Problem]:
    """Yield references to secrets of the scheduler, which contain tokens of other jobs."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            where = f"{path}.{key}" if path else str(key)
            named = key in ("name", "secretName") and isinstance(inner, str)
            if named and inner.startswith(names.SECRET_PREFIX):
                yield Problem(
                    where, f"'{inner}' holds the token of a job; the scheduler alone uses it"
                )
            yield from _own_secrets(inner, where)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _own_secrets(inner, f"{path}[{index}]")


def _namespace_rules(spec: Mapping[str, Any], options: KubernetesOptions) -> Iterator[Problem]:
    for field in ("serviceAccountName", "serviceAccount"):
        account = spec.get(field)
        if account not in (None, "", "default", *options.service_accounts):
            known = ", ".join(("default", *options.service_accounts))
            yield Problem(
                f"spec.{field}",
                f"'{account}' is not allowed; allowed are: {known}. An administrator adds others "
                "with serve --allow-service-account",
            )
    priority = spec.get("priorityClassName")
    if isinstance(priority, str) and priority.startswith("system-"):
        yield Problem(
            "spec.priorityClassName",
            f"'{priority}' is for the cluster's own pods; name another class",
        )


def _baseline(spec: Mapping[str, Any], annotations: Mapping[str, Any]) -> Iterator[Problem]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield Problem(f"spec.{field}", "must be false")
    for index, volume in enumerate(spec.get("volumes") or ()):
        if volume.get("hostPath") is not None:
            yield Problem(f"spec.volumes[{index}].hostPath", "is not allowed; use another volume")
    for key, profile in annotations.items():
        text = str(profile)
        allowed = text in ("", "runtime/default") or text.startswith("localhost/")
        if str(key).startswith(_APPARMOR_ANNOTATION) and not allowed:
            yield Problem(f"metadata.annotations['{key}']", f"'{text}' must be runtime/default")
    for path, context in _contexts(spec):
        yield from _baseline_context(path, context)
    for path, container in _containers(spec):
        for index, port in enumerate(_list(container.get("ports"))):
            if _map(port).get("hostPort"):
                yield Problem(f"{path}.ports[{index}].hostPort", "is not allowed; remove it")
        yield from _hosts_of_handlers(path, container)


def _baseline_context(path: str, context: Mapping[str, Any]) -> Iterator[Problem]:
    if context.get("privileged"):
        yield Problem(f"{path}.privileged", "must be false")
    if _map(context.get("windowsOptions")).get("hostProcess"):
        yield Problem(f"{path}.windowsOptions.hostProcess", "must be false")
    yield from _added(path, context, _BASELINE_CAPABILITIES)
    if context.get("procMount") not in (None, "", "Default"):
        yield Problem(f"{path}.procMount", "must be Default")
    for field in ("seccompProfile", "appArmorProfile"):
        kind = _map(context.get(field)).get("type")
        if kind not in (None, *_PROFILES):
            yield Problem(f"{path}.{field}.type", f"'{kind}' must be RuntimeDefault or Localhost")
    selinux = _map(context.get("seLinuxOptions"))
    if selinux.get("type") not in (None, *_SELINUX_TYPES):
        yield Problem(f"{path}.seLinuxOptions.type", f"'{selinux['type']}' must be container_t")
    for field in ("user", "role"):
        if selinux.get(field):
            yield Problem(f"{path}.seLinuxOptions.{field}", "is not allowed; remove it")
    for index, sysctl in enumerate(_list(context.get("sysctls"))):
        name = _map(sysctl).get("name")
        if name not in _SAFE_SYSCTLS:
            yield Problem(f"{path}.sysctls[{index}].name", f"'{name}' is not a safe sysctl")


def _restricted(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield forbidden fields; `make_restricted` fills in the required ones."""
    for index, volume in enumerate(spec.get("volumes") or ()):
        for kind in sorted(set(volume) - {"name", "hostPath"} - _RESTRICTED_VOLUMES):
            yield Problem(
                f"spec.volumes[{index}].{kind}",
                f"is not allowed; allowed are: {', '.join(sorted(_RESTRICTED_VOLUMES))}",
            )
    for path, context in _contexts(spec):
        if context.get("runAsNonRoot") not in (None, True):
            yield Problem(f"{path}.runAsNonRoot", "must be true")
        if context.get("runAsUser") == 0:
            yield Problem(f"{path}.runAsUser", "must not be 0; name the user of the image")
    for path, container in _containers(spec):
        context, inside = container.get("securityContext") or {}, f"{path}.securityContext"
        if context.get("allowPrivilegeEscalation") not in (None, False):
            yield Problem(f"{inside}.allowPrivilegeEscalation", "must be false")
        dropped = _map(context.get("capabilities")).get("drop")
        if dropped is not None and "ALL" not in _list(dropped):
            yield Problem(f"{inside}.capabilities.drop", "must have ALL")
        yield from _added(inside, context, _RESTRICTED_CAPABILITIES)


def _added(path: str, context: Mapping[str, Any], allowed: set[str]) -> Iterator[Problem]:
    for capability in _list(_map(context.get("capabilities")).get("add")):
        if capability not in allowed:
            yield Problem(f"{path}.capabilities.add", f"'{capability}' is not allowed; remove it")


def _hosts_of_handlers(path: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield probes and hooks that make a kubelet connect to another host."""
    handlers = {name: container.get(name) for name in _HANDLERS}
    hooks = _map(container.get("lifecycle"))
    handlers |= {f"lifecycle.{name}": hooks.get(name) for name in ("postStart", "preStop")}
    for name, handler in handlers.items():
        for kind in ("httpGet", "tcpSocket"):
            if _map(_map(handler).get(kind)).get("host"):
                yield Problem(f"{path}.{name}.{kind}.host", "is not allowed; remove it")


def _containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in _CONTAINERS:
        for index, container in enumerate(spec.get(kind) or ()):
            yield f"spec.{kind}[{index}]", container


def _contexts(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "spec.securityContext", spec.get("securityContext") or {}
    for path, container in _containers(spec):
        yield f"{path}.securityContext", container.get("securityContext") or {}


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
