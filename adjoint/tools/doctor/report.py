"""The text of ``adjoint doctor``."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

YES, NO, ABSENT = "[green]✓[/green]", "[red]✗[/red]", "[dim]–[/dim]"
Rows = list[tuple[str, ...]]


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of `doctor.examine`."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # else 80, and the lines of a log would be folded
    for title, rows in (
        ("System", _system(report["system"])),
        ("Packages", _packages(report["packages"])),
        ("Devices", _devices(report["devices"])),
        ("C++ kernels", _build(report["cpp_build"])),
        ("Backends", _backends(report["backends"])),
        ("What backend=None takes", _choices(report["choices"])),
        ("Threads and memory", _settings(report)),
        ("Selective scan and its gradients against the reference in float64", _checks(report["checks"])),
    ):
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in rows[0]:
            table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(f"[bold]{title}[/bold]", table, "", sep="\n")
    for line in report["advice"]:
        console.print(f"[yellow]![/yellow] {escape(line)}")
    diagnosis = f"{YES} works" if report["works"] else f"{NO} no backend computes a scan right here"
    console.print(f"{diagnosis}  [dim]({report['seconds']:.1f} s)[/dim]")


def _system(system: dict[str, Any]) -> Rows:
    cuda = f"built for CUDA {system['torch_cuda']}" if system["torch_cuda"] else "built without CUDA"
    return [
        ("adjoint", system["adjoint"]),
        ("Python", escape(f"{system['python']}, {system['executable']}")),
        ("PyTorch", cuda),
        ("platform", escape(system["platform"])),
    ]


def _packages(packages: list[dict[str, Any]]) -> Rows:
    rows: Rows = []
    for package in packages:
        name, version, purpose = package["name"], package["version"], escape(package["purpose"])
        if package["problem"]:
            rows.append((NO, name, version, f"{purpose}: {escape(package['problem'])}"))
        elif version:
            rows.append((YES, name, version, purpose))
        else:
            source = escape(f"pip install '{package['source'] or name}'")
            rows.append((ABSENT, name, "missing", f"{purpose} [dim]({source})[/dim]"))
    return rows


def _devices(devices: dict[str, Any]) -> Rows:
    cpu, driver = devices["cpu"], devices["driver"]
    vectors = " ".join(cpu["vectors"])
    rows: Rows = [("CPU", f"{cpu['model']}, {cpu['cores']} cores, {_gib(cpu['memory_bytes'])}, {vectors}")]
    for gpu in devices["cuda"]:
        details = f"{gpu['multiprocessors']} multiprocessors, {_gib(gpu['memory_bytes'])}"
        rows.append((f"cuda:{gpu['index']}", f"{gpu['name']}, sm_{gpu['capability']}, {details}"))
    if not devices["cuda"]:
        rows.append(("CUDA", "no device that PyTorch can use"))
    rows += [("driver", told) for told in (*driver["devices"], *driver["notes"])]
    return [(what, escape(told)) for what, told in rows]


def _build(build: dict[str, Any]) -> Rows:
    works, writable, problem = build["works"], build["cache_writable"], build["compiler_problem"]
    how = "taken from the cache" if build["from_cache"] else "built now"
    compiler = f"{build['compiler']}: {build['compiler_version'] or 'version unknown'}"
    if problem is not None:
        compiler = f"{build['compiler'] or ''} {problem}".strip()
    return [
        (YES, f"{how} in {build['seconds']:.2f} s", escape(build["library"]))
        if works
        else (NO, "not usable", escape(build["reason"])),
        (YES if problem is None else NO, "compiler", escape(compiler)),
        (YES if writable else NO, "cache", escape(build["cache"]) + ("" if writable else ": not writable")),
    ]


def _backends(backends: dict[str, Any]) -> Rows:
    rows: Rows = [(YES, name, "usable") for name in backends["usable"]]
    return rows + [(ABSENT, name, escape(reason)) for name, reason in backends["unusable"].items()]


def _choices(choices: list[dict[str, Any]]) -> Rows:
    """A row an operation and device: each backend with the dtypes that go to it, and why others get none or
    not all of them; how to install them is said where the backends are listed."""
    rows: Rows = []
    for (device, operation), group in groupby(choices, lambda row: (row["device"], row["operation"])):
        taken: dict[str, list[str]] = {}
        reasons: dict[str, None] = {}
        for row in group:
            taken.setdefault(row["backend"], []).append(row["dtype"])
            reasons |= dict.fromkeys(
                f"{name}: {reason.partition(' (pip')[0]}" for name, reason in row["passed_over"].items()
            )
        told = "; ".join(f"{name} [dim]({', '.join(dtypes)})[/dim]" for name, dtypes in taken.items())
        where = device if row["here"] else f"{device} [dim](none here)[/dim]"
        rows.append((where, operation, told, f"[dim]{escape('; '.join(reasons))}[/dim]"))
    return rows


def _settings(report: dict[str, Any]) -> Rows:
    threads, allocator = report["threads"], report["allocator"]
    told = f"{threads['torch']} threads, {threads['interop']} between operations, {threads['parallel']}"
    return [
        ("PyTorch", told),
        ("environment", _environment(threads["settings"])),
        ("allocator", escape(allocator["name"])),
        ("environment", _environment(allocator["settings"])),
    ]


def _environment(settings: dict[str, str | None]) -> str:
    is_set = " ".join(f"{name}={value}" for name, value in settings.items() if value is not None)
    unset = " ".join(name for name, value in settings.items() if value is None)
    return "  ".join(filter(None, (escape(is_set), unset and f"[dim]unset: {unset}[/dim]")))


def _checks(checks: list[dict[str, Any]]) -> Rows:
    rows: Rows = []
    for check in checks:
        error = "no result" if check["error"] is None else f"{check['error']:.1e}"
        told = check["problem"] or f"relative error {error}, at most {check['tolerance']:.0e}"
        mark = YES if check["passed"] else NO
        rows.append((mark, check["backend"], check["device"], check["dtype"], escape(told)))
    return rows


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
