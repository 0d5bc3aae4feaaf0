"""Who is measured: what each server and client is started with, and how a client's figures are read."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("CARGO_TARGET_DIR") or HERE.parents[1] / ".build")
TWINRAIL = Path(os.environ.get("TWINRAIL") or BUILD / "release")
SPDK = Path(os.environ.get("SPDK") or "(SPDK is not set)")
NQN = "nqn.2016-06.io.spdk:bench"
OURS, MIB, VOLUME = "twinrail", 1 << 20, 1 << 30


class Case(NamedTuple):
    operation: str  # read or write
    random: bool
    block: int
    depth: int

    @property
    def direction(self) -> str:  # as fio and SPDK call it
        return ("rand" if self.random else "") + self.operation

    @property
    def name(self) -> str:
        size = f"{self.block // MIB}m" if self.block >= MIB else f"{self.block >> 10}k"
        return f"{self.direction}-{size}-qd{self.depth}"


def cases(backend: str) -> list[Case]:
    depths, large = ((1, 8, 32, 128), (128 << 10, MIB)) if backend == "ram" else ((1, 32), (MIB,))
    small = [Case(operation, True, 4096, depth) for operation in ("read", "write") for depth in depths]
    return small + [Case(operation, False, block, 8) for block in large for operation in ("read", "write")]


class Place(NamedTuple):
    """Where one server runs: `folder` is its own, `volume` the file that it serves if it serves a file."""

    folder: Path
    volume: Path
    port: int


class Server(NamedTuple):
    argv: Callable[[Place], list[str]]
    polls: bool = False  # its threads spin, also while the client starts and ends
    huge_mib: int = 0  # huge pages that it and its client need
    config: Callable[[Place], str] | None = None


class Client(NamedTuple):
    """`figures` turns the output into ios, seconds, p50_us, p99_us, p999_us and cpu_seconds."""

    argv: Callable[[Place, Case, int], list[str]]
    figures: Callable[[str, Case, int], dict[str, float]]


class Peer(NamedTuple):
    name: str
    note: str
    server: Server
    client: Client


def twinrail_argv(place: Place, case: Case, seconds: int) -> list[str]:
    url, pattern = f"twinrail://127.0.0.1:{place.port}/v", "random" if case.random else "sequential"
    words = f"--pattern {pattern} --read-percent {100 if case.operation == 'read' else 0} --block-size {case.block}"
    rest = f"--depth {case.depth} --queues 1 --seconds {seconds} --json"
    return [str(TWINRAIL / "twinrail"), "bench", url, *words.split(), *rest.split()]


def lean_argv(place: Place, case: Case, seconds: int) -> list[str]:
    pattern = "random" if case.random else "sequential"
    words = (place.port, case.operation, pattern, case.block, case.depth, seconds)
    return [str(place.folder.parent / "nbdperf"), *map(str, words)]


def json_figures(output: str, case: Case, seconds: int) -> dict[str, float]:
    return json.loads(output)


def fio_argv(place: Place, case: Case, seconds: int) -> list[str]:
    load = f"--uri=nbd://127.0.0.1:{place.port} --rw={case.direction} --bs={case.block} --iodepth={case.depth}"
    how = f"--time_based --runtime={seconds} --norandommap --randrepeat=0 --output-format=json"
    latency = "--clat_percentiles=0 --lat_percentiles=1 --percentile_list=50:99:99.9"
    return ["fio", "--name=bench", "--ioengine=nbd", *load.split(), *how.split(), *latency.split()]


def fio_figures(output: str, case: Case, seconds: int) -> dict[str, float]:
    job = json.loads(output[output.index("{") :])["jobs"][0]
    done = job[case.operation]
    us = {float(share): ns / 1000 for share, ns in done["lat_ns"]["percentile"].items()}
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    latency = {"p50_us": us[50.0], "p99_us": us[99.0], "p999_us": us[99.9]}
    return {"ios": done["total_ios"], "seconds": done["runtime"] / 1000, "cpu_seconds": cpu} | latency


def spdk_argv(place: Place, case: Case, seconds: int) -> list[str]:
    address = f"trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{place.port} subnqn:{NQN}"
    load = f"-w {case.direction} -o {case.block} -q {case.depth} -t {seconds} -c 0x1 -s 256 -L"
    return [str(SPDK / "spdk_nvme_perf"), "-r", address, *load.split()]


def spdk_digest_argv(place: Place, case: Case, seconds: int) -> list[str]:
    return [*spdk_argv(place, case, seconds), "--enable-tcp-ddgst"]


def spdk_figures(output: str, case: Case, seconds: int) -> dict[str, float]:
    total = re.search(r"^Total\s*:\s*([\d.]+)", output, re.M)
    if not total:
        raise ValueError("spdk_nvme_perf printed no total")
    us = {float(share): float(value) for share, value in re.findall(r"^\s*([\d.]+)% :\s*([\d.]+)us", output, re.M)}
    latency = {"p50_us": us[50.0], "p99_us": us[99.0], "p999_us": us[99.9]}
    return {"ios": float(total[1]) * seconds, "seconds": seconds, "cpu_seconds": seconds} | latency  # it spins


def twinrail_server(volume: str) -> Server:
    def argv(place: Place) -> list[str]:
        words = f"serve --listen 127.0.0.1:{place.port} --metrics off --volume".split()
        return [str(TWINRAIL / "twinrail-target"), *words, "v=" + volume.format(volume=place.volume)]

    return Server(argv)


def nbd_server(command: str) -> Server:
    return Server(lambda place: [word.format(port=place.port, volume=place.volume) for word in command.split()])


def spdk_server(mib: int, method: str, parameters: Callable[[Place], dict]) -> Server:
    def argv(place: Place) -> list[str]:
        words = f"-m 0x2 --disable-cpumask-locks --no-pci -s {mib}".split()
        files = ["-r", str(place.folder / "rpc"), "-c", str(place.folder / "config")]
        return [str(SPDK / "nvmf_tgt"), *words, *files]

    def config(place: Place) -> str:
        listen = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(place.port)}
        calls = {
            "bdev": [(method, parameters(place) | {"name": "v", "block_size": 4096})],
            "nvmf": [
                ("nvmf_create_transport", {"trtype": "TCP", "max_io_size": MIB}),
                ("nvmf_create_subsystem", {"nqn": NQN, "allow_any_host": True, "serial_number": "BENCH"}),
                ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "v"}}),
                ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": listen}),
            ],
        }
        parts = {name: [{"method": m, "params": p} for m, p in part] for name, part in calls.items()}
        return json.dumps({"subsystems": [{"subsystem": name, "config": part} for name, part in parts.items()]})

    return Server(argv, polls=True, huge_mib=mib + 300, config=config)


def peers(backend: str) -> list[Peer]:
    """In the order of the tables. Peers of one server share its process."""
    nbdkit, qemu = "nbdkit -f -i 127.0.0.1 -p {port} ", "qemu-nbd -t -f raw --aio=io_uring -b 127.0.0.1 -p {port} "
    if backend == "ram":
        ours = twinrail_server("memory,size=1G"), "its own memory"
        kit = nbd_server(nbdkit + "memory 1G allocator=malloc"), "malloc", "nbdkit memory"
        emulator = nbd_server(qemu + "--cache=writeback {volume}"), "tmpfs file, io_uring"
        blocks = {"num_blocks": VOLUME // 4096}
        spdk = spdk_server(1400, "bdev_malloc_create", lambda place: blocks), "malloc in huge pages"
    else:
        ours = twinrail_server("{volume}"), "file"
        kit = nbd_server(nbdkit + "file {volume} cache=none"), "page cache, as it has no O_DIRECT", "nbdkit file"
        emulator = nbd_server(qemu + "--cache=none {volume}"), "O_DIRECT, io_uring"
        spdk = spdk_server(400, "bdev_aio_create", lambda place: {"filename": str(place.volume)}), "O_DIRECT, libaio"
    fio, crc, spins = Client(fio_argv, fio_figures), "CRC32C of every payload", "both sides poll a core each"
    return [
        Peer(OURS, f"{ours[1]}; {crc}", ours[0], Client(twinrail_argv, json_figures)),
        Peer(f"{kit[2]}, fio", kit[1], kit[0], fio),
        Peer(f"{kit[2]}, lean client", kit[1], kit[0], Client(lean_argv, json_figures)),
        Peer("qemu-nbd, fio", emulator[1], emulator[0], fio),
        Peer("SPDK, no digest", f"{spdk[1]}; {spins}", spdk[0], Client(spdk_argv, spdk_figures)),
        Peer("SPDK, data digest", f"{spdk[1]}; {crc}; {spins}", spdk[0], Client(spdk_digest_argv, spdk_figures)),
    ]


VERSIONS = {
    str(TWINRAIL / "twinrail"): "--version",
    "nbdkit": "--version",
    "qemu-nbd": "--version",
    "fio": "--version",
    str(SPDK / "nvmf_tgt"): "-v",
    "cc": "--version",
}
