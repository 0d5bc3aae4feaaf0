"""Prints the result of a run as markdown, with the ratio of ours to each peer in every cell."""

from statistics import median

from peers import OURS

NOISY = 0.15  # of one CPU, used by others while a sample was taken


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def head(*cells: str) -> None:
    print()
    row(*cells)
    row(*["---"] * len(cells))


def show(result: dict) -> float | None:
    """Returns the lowest ratio of ours to nbdkit, None unless every cell has one."""
    names = [peer["name"] for peer in result["peers"]]
    good = [sample for sample in result["samples"] if "error" not in sample]
    cells: dict[tuple[str, str], list[dict]] = {}
    for sample in good:
        cells.setdefault((sample["case"], sample["peer"]), []).append(sample)

    def middle(case: str, name: str, key: str) -> float:
        return median(sample[key] for sample in cells[case, name])

    ratios = {
        (case, name): middle(case, OURS, "iops") / middle(case, name, "iops")
        for case, name in cells
        if name != OURS and (case, OURS) in cells
    }

    def throughput(case: str, name: str) -> str:
        if (case, name) not in cells:
            return ""
        small = f"{middle(case, name, 'iops') / 1000:.1f}k"
        value = small if "-4k-" in case else f"{middle(case, name, 'mib_per_s'):.0f}"
        return f"{value} ({ratios[case, name]:.2f})" if (case, name) in ratios else value

    print(f"{result['started']}, {result['backend']} backing, {result['cpu']}, kernel {result['kernel']}, default")
    print(f"congestion control {result['congestion']}, {result['rounds']} rounds of {result['seconds']} s")
    print(f"\n{'; '.join(result['versions'])}")
    for name, reason in result["skipped"].items():
        print(f"\nskipped {name}: {reason}")
    for sample in result["samples"]:
        if "error" in sample:
            print(f"\nfailed {sample['case']} {sample['peer']}: {sample['error']}")
    noisy = sum(sample["foreign"] > NOISY for sample in good)
    print(f"\n{noisy} of {len(good)} samples had something else using more than {NOISY:.0%} of a CPU")

    head("peer", "backing", "congestion control")
    for peer in result["peers"]:
        row(peer["name"], peer["note"], peer["congestion"])

    print("\nMedian throughput (4 KiB: IOPS, larger: MiB/s), and how many times that ours is:")
    head("cell", *names)
    for case in result["cases"]:
        row(case, *(throughput(case, name) for name in names))

    print("\nMedians; latencies in us; CPU in seconds for a million I/Os:")
    columns = ("p50", "p99", "p99.9", "server CPU", "client CPU", "ours / it")
    head("cell", "peer", "IOPS (lowest..highest)", "MiB/s", *columns)
    for case, name in ((case, name) for case in result["cases"] for name in names if (case, name) in cells):
        iops = [sample["iops"] for sample in cells[case, name]]
        spread = f"{median(iops):.0f} ({min(iops):.0f}..{max(iops):.0f})"
        rest = [f"{middle(case, name, key):.1f}" for key in ("p50_us", "p99_us", "p999_us", "server_cpu", "client_cpu")]
        times = f"{ratios[case, name]:.2f}" if (case, name) in ratios else ""
        row(case, name, spread, f"{middle(case, name, 'mib_per_s'):.0f}", *rest, times)

    nbdkit = [(case, name) for case in result["cases"] for name in names if name.startswith("nbdkit")]
    known = [cell for cell in nbdkit if cell in ratios]
    if not known:
        print("\nmin ratio vs nbdkit: none was measured")
        return None
    lowest, missing = min(known, key=ratios.__getitem__), len(nbdkit) - len(known)
    note = f"; {missing} cells are missing" if missing else ""
    print(f"\nmin ratio vs nbdkit: {ratios[lowest]:.2f} ({', '.join(lowest)}){note}")
    return None if missing else ratios[lowest]
