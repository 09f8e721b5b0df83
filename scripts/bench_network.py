#!/usr/bin/env python
"""Time dense and compressed training on networks of limited rate; write a table.

    scripts/bench_network.py exchange --hosts 2 4 --rates 1gbit 100mbit
    scripts/bench_network.py fit --hosts 4 --rates 100mbit 20mbit+50ms+0.1% \
        --rows dense/horovod dgc/hybrid

`exchange` sums one gradient of 25 million float32 over the workers; `fit` trains the
fully connected layers of AlexNet (58.6 million parameters) with `Model.fit`. Workers
are hosts of scripts/netlab.py, one each. A network is a rate, which may have a delay of
what each host sends (half of a round trip) and a loss. A row is METHOD/TRANSPORT:

    dense      everything is exchanged; over collective that is the ring all-reduce of
               MultiWorkerMirroredStrategy
    dgc        Deep Gradient Compression at sparsity 0.999, compression included, and
               the change of the weights, which dense training has still to make
    owners     exchange only: as dgc, and messages go to owners of elements
    alone      exchange only: what dgc computes, on all workers at once, with nothing
               exchanged
    averaging  fit only: parameters are averaged every 16 steps
    rounds     as that, and 5% of the changes are sent, by signs
    flights    as that, and a round is sent while the next 16 steps are taken
    apart      fit only: each worker trains by itself; nothing is exchanged
    split      fit only: each worker trains a part of each layer, and activations travel
    auto       fit only: what AutoStrategy has chosen of dense and dgc, which is named
    ddp, powersgd, powersgd_2, local_sgd
               fit only, over gloo: PyTorch's DistributedDataParallel with the same
               network: as it is, with its hook of PowerSGD, of rank 1 and 2, which
               needs `--warmup 3`, and averaging every 16 steps; takes `--torch
               PYTHON`, one that has PyTorch

Each run of a row leaves a JSON file in the folder of results: the seconds of every
step, and the bytes at the workers' interfaces. Runs that are there are not repeated, so
that a table can grow; `--runs 1 2 3` makes three of each. table.md and plot.png show
all that is there. `fit --predict` sets what `tf_dgc.advise` predicts beside them, from
what these hosts measure while all are busy. Rows of the same transport share a run's
processes in `exchange`, and take turns.

Needs what netlab.py needs, and matplotlib for the plot.

References:
    Krizhevsky, Sutskever, Hinton: ImageNet classification with deep convolutional
    neural networks, NIPS 2012 (AlexNet)
"""

import argparse
import itertools
import json
import os
import pathlib
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

METHODS = {
    "exchange": ("dense", "dgc", "owners", "alone"),
    "fit": (
        *("dense", "dgc", "averaging", "rounds", "flights"),
        *("apart", "split", "auto"),
        *("ddp", "powersgd", "powersgd_2", "local_sgd"),
    ),
}
TRANSPORTS = ("collective", "horovod", "hybrid", "gloo")
ROWS = {
    "exchange": [
        *("dense/collective", "dgc/collective"),
        *("dense/horovod", "dgc/horovod", "alone/horovod"),
    ],
    "fit": ["dense/collective", "dense/horovod", "dgc/hybrid", "averaging/hybrid"],
}
SPARSITY, PERIOD, MOMENTUM, CLASSES = 0.999, 16, 0.9, 1000
AVERAGING = ("averaging", "rounds", "flights", "local_sgd")
DDP = ("ddp", "powersgd", "powersgd_2", "local_sgd")
COUNTERS = pathlib.Path("/sys/class/net/eth0/statistics")
FAR_COUNTERS = pathlib.Path("/sys/class/net/out/statistics")  # where sent late
COUNTED = ("sent", "received", "sent_again")
SEGMENT = 1514  # bytes of a full packet
RING_PORT, RING_PIECES = 7411, 16  # pieces of 1 MiB
KEYS = "task hosts rate method transport elements batch_size sleep".split()


def counted() -> tuple[int, int, int]:
    """Returns the bytes that this host has sent, received and sent again.

    What TCP sent again is counted in segments, all taken to be full.
    """
    received = int((COUNTERS / "rx_bytes").read_text())
    files = (COUNTERS / "tx_bytes", FAR_COUNTERS / "tx_bytes")
    sent = sum(int(file.read_text()) for file in files if file.exists())
    lines = pathlib.Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return sent, received, SEGMENT * int(values[names.index("RetransSegs")])


def exchange(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what this worker measured of each method that takes part."""
    import tensorflow as tf

    import tf_dgc
    from tf_dgc import transports
    from tf_dgc.compression import dgc
    from tf_dgc.exchanges import EachStep, Ledger
    from tf_dgc.transports import grid

    # As strategies do: over a grid of 9 workers or more, where the network is slow.
    transport = grid.chosen(transports.resolve(args.transport))
    config = tf_dgc.DGCConfig(sparsity=SPARSITY)
    by_owners = tf_dgc.DGCConfig(sparsity=SPARSITY, exchange="owners")
    makers: dict[str, Callable[[], Ledger]] = {
        "dense": lambda: Ledger(transport, EachStep(None)),
        "dgc": lambda: Ledger(transport, EachStep(config)),
        "owners": lambda: Ledger(transport, EachStep(by_owners)),
        "alone": lambda: Ledger(transports.resolve("local"), EachStep(config)),
    }
    ledgers = {method: makers[method]() for method in args.methods}
    side = round(args.elements**0.5)
    kernel = tf.Variable(tf.zeros([side, side]), name="kernel")
    owner = tf.Module()  # stands for the optimizer
    momentum = dgc.Momentum(MOMENTUM, nesterov=False, learning_rate=0.1)

    def step_of(ledger: Ledger) -> Callable[..., Any]:
        @tf.function(autograph=False)
        def step(gradient: tf.Tensor) -> Any:
            return ledger.gradients(owner, [gradient], [kernel], momentum).gradients

        return step

    steps = {method: step_of(each) for method, each in ledgers.items()}

    @tf.function
    def gradient_of(step: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_normal(kernel.shape, [transport.rank, step])

    found = {m: {name: [] for name in ("seconds", *COUNTED)} for m in args.methods}
    for step in range(args.warmup + args.steps):
        gradient = gradient_of(tf.constant(step))
        for method, function in steps.items():
            transport.barrier()
            before = counted()
            start = time.perf_counter()
            function(gradient)
            seconds = time.perf_counter() - start
            transport.barrier()
            after = counted()
            if step >= args.warmup:
                found[method]["seconds"].append(seconds)
                for name, now, then in zip(COUNTED, after, before, strict=True):
                    found[method][name].append(now - then)
    for method, each in ledgers.items():
        stats = each.stats()
        found[method]["stats_sent"] = int(stats.sent_bytes)
        found[method]["stats_received"] = int(stats.received_bytes)
        found[method]["stats_dense"] = int(stats.dense_bytes)
        found[method]["uncompressed"] = 0
        found[method]["elements"] = side * side
    return found


def alexnet(width: int = 4096, split: bool = False) -> Any:
    """Returns the fully connected layers of AlexNet, compiled."""
    import keras

    import tf_dgc

    def dense(units: int, activation: str, way: str) -> Any:
        if split:
            return tf_dgc.layers.SplitDense(units, activation, by=way)
        return keras.layers.Dense(units, activation)

    model = keras.Sequential(
        [
            keras.Input((width * 9 // 4,)),
            dense(width, "relu", "rows"),  # the ways that `split_dense` chooses
            dense(width, "relu", "columns"),
            dense(CLASSES, "softmax", "rows"),
        ]
    )
    sgd = keras.optimizers.SGD(0.01, momentum=MOMENTUM)
    model.compile(sgd, "sparse_categorical_crossentropy")
    return model


def activations(workers: int, rows: int, width: int) -> float:
    """Returns the bytes of activations that a worker of split layers sends in a step.

    Of N workers with m rows each, the first layer, by rows, sends N - 1 N-ths of its
    inputs, and units to N - 1 workers and their gradient back; the second, by columns,
    inputs to N - 1 workers and their gradient back; the third, by rows after columns,
    units to N - 1 workers and their gradient back, and N - 1 N-ths of the gradient of
    the second one's bias. The first two send their number of rows, too, of 8 bytes, and
    all together a weight.
    """
    first = rows * (width * 9 // 4 / workers + 2 * width)
    others = rows * 2 * (width + CLASSES) + width / workers
    return 4.0 * (workers - 1) * (first + others + 5)


def fit(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what this worker measured of the one method of this job."""
    import keras
    import tensorflow as tf

    import tf_dgc

    (method,) = args.methods
    config = tf_dgc.DGCConfig(sparsity=SPARSITY)
    signs = tf_dgc.DGCConfig(sparsity=0.95, value_dtype="sign")
    settings = {"rounds": {"compression": signs}}
    settings["flights"] = settings["rounds"] | {"overlap": PERIOD}
    averaging = tf_dgc.AveragingConfig(period=PERIOD, **settings.get(method, {}))
    strategy = {
        "dense": lambda: tf_dgc.DenseStrategy(transport=args.transport),
        "split": lambda: tf_dgc.DenseStrategy(transport=args.transport),
        "dgc": lambda: tf_dgc.DGCStrategy(config, transport=args.transport),
        "averaging": lambda: tf_dgc.ParameterAveragingStrategy(
            averaging, transport=args.transport
        ),
        "apart": lambda: tf_dgc.DenseStrategy(transport="local"),
        "auto": lambda: tf_dgc.AutoStrategy(dgc=config, transport=args.transport),
    }["averaging" if method in AVERAGING else method]()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = alexnet(args.width, method == "split")
    rows = args.batch_size * strategy.num_replicas_in_sync
    images = tf.random.stateless_normal([rows, args.width * 9 // 4], [1, 2])
    labels = tf.random.stateless_uniform([rows], [1, 3], 0, CLASSES, tf.int32)
    batch = tf.data.Dataset.from_tensors((images, labels))
    timed = timed_steps(args, method)
    data = batch.repeat(args.warmup + timed)
    ends: list[tuple[float, int, int, int]] = []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(args.sleep)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ends.append((time.perf_counter(), *counted()))

    model.fit(data, verbose=0, callbacks=[Clock()])
    last, total = strategy.stats(), strategy.stats(total=True)
    sent = last.sent_bytes
    if method in AVERAGING:  # one round; the end of the epoch is another
        sent = total.sent_bytes // (timed // PERIOD + 1) // PERIOD
    vectors = [v for v in model.trainable_variables if len(v.shape) == 1]
    result = by_step(ends, args, method)
    result["stats_sent"] = int(sent) if method != "apart" else 0
    result["stats_dense"] = int(last.dense_bytes)
    result["uncompressed"] = 4 * sum(v.shape[0] for v in vectors)
    if method in AVERAGING:
        result["uncompressed"] /= PERIOD
    sizes = [args.width * 9 // 4, args.width, args.width, CLASSES]
    result["elements"] = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
    if method == "auto":
        result["choice"], _, result["reason"] = strategy.choice
    if method == "split":
        workers = strategy.num_replicas_in_sync
        result["activations"] = activations(workers, args.batch_size, args.width)
    return {method: result}


def timed_steps(args: argparse.Namespace, method: str) -> int:
    """Returns how many steps are timed; of averaging, periods with a round each."""
    return -(-args.steps // PERIOD) * PERIOD if method in AVERAGING else args.steps


def by_step(
    ends: Sequence[tuple[float, int, int, int]], args: argparse.Namespace, method: str
) -> dict[str, Any]:
    """Returns seconds and bytes of the timed steps, from the ends of all steps.

    Where not all steps exchange, those of a period count as what they cost on average.
    """
    used = zip(ends[args.warmup - 1 :], ends[args.warmup :], strict=False)
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in used]
    if method in AVERAGING:
        parts = [steps[i : i + PERIOD] for i in range(0, len(steps), PERIOD)]
        steps = [[sum(each) / PERIOD for each in zip(*p, strict=True)] for p in parts]
    names = enumerate(("seconds", *COUNTED))
    return {name: [step[i] for step in steps] for i, name in names}


def leave(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Writes what this worker found into a file of its own."""
    address = (COUNTERS.parent / "address").read_text()  # differs between hosts
    file = pathlib.Path(args.worker) / address.strip().replace(":", "")
    file.write_text(json.dumps(found))


def probe(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `tf_dgc.advise` predicts from, of this host while all are busy."""
    import tensorflow as tf

    from tf_dgc import DGCConfig, transports
    from tf_dgc.lab import measure

    transport = transports.resolve(args.transport)
    reduce = tf.function(lambda: transport.all_reduce([tf.zeros([1])], "probe"))
    config, latency = DGCConfig(sparsity=SPARSITY), []
    cluster = json.loads(os.environ["TF_CONFIG"])
    hosts = [worker.split(":")[0] for worker in cluster["cluster"]["worker"]]
    with Ring(hosts, cluster["task"]["index"]) as ring:
        bandwidth = [ring.bandwidth() for _ in range(5)]
        for _ in range(50):
            ring.meet()
            start = time.perf_counter()
            reduce()
            hops = 2 * (transport.size - 1)
            latency.append((time.perf_counter() - start) / hops)
        measured, _ = measure.measure(
            lambda: alexnet(args.width), config, args.batch_size, 40, ring.meet
        )
    return {"measured": measured, "bandwidth": bandwidth, "latency": latency}


class Ring:
    """Connections from each host to the next one."""

    def __init__(self, hosts: Sequence[str], index: int) -> None:
        self._hosts, deadline = len(hosts), time.monotonic() + 60
        following = hosts[(index + 1) % len(hosts)], RING_PORT
        with socket.create_server((hosts[index], RING_PORT)) as server:
            while True:
                try:
                    self._sender = socket.create_connection(following, timeout=60)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
            server.settimeout(60)
            self._receiver, _ = server.accept()
        self._sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._receiver.settimeout(60)

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._receiver.close()

    def meet(self) -> None:
        """Returns when all hosts have come here."""
        for _ in range(self._hosts - 1):
            self._sender.sendall(b" ")
            if not self._receiver.recv(1):
                raise ConnectionError("A host is gone.")

    def bandwidth(self) -> float:
        """Returns the bits per second that come while all hosts send."""
        piece, buffer = bytes(1 << 20), bytearray(1 << 20)
        self.meet()
        start = time.perf_counter()
        sending = threading.Thread(
            target=lambda: [self._sender.sendall(piece) for _ in range(RING_PIECES)]
        )
        sending.start()
        left = RING_PIECES * len(piece)
        while left:
            got = self._receiver.recv_into(buffer, min(left, len(buffer)))
            if not got:
                raise ConnectionError("A host is gone.")
            left -= got
        sending.join()
        return 8 * RING_PIECES * len(piece) / (time.perf_counter() - start)


def jobs(args: argparse.Namespace) -> Iterator[tuple[int, str, int, str, list[str]]]:
    """Yields run, rate, hosts, transport and methods of each job that is missing."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in args.rows:
        method, transport = row.split("/")
        # `fit` takes a process for each method.
        key = (transport, "" if args.task == "exchange" else method)
        groups.setdefault(key, []).append(method)
    for run in args.runs:
        for rate in args.rates:
            for hosts in args.hosts:
                for (transport, _), methods in groups.items():
                    job = (run, rate, hosts, transport)
                    if not all(file_of(args, *job, m).exists() for m in methods):
                        yield (*job, methods)


def file_of(
    args: argparse.Namespace,
    run: int,
    rate: str,
    hosts: int,
    transport: str,
    method: str,
) -> pathlib.Path:
    """Returns the file of one run of one row."""
    work = (
        args.elements if args.task == "exchange" else f"{args.width}x{args.batch_size}"
    )
    if args.sleep:
        work = f"{work}-sleep{args.sleep:g}"
    name = f"{args.task}-{work}-{method}-{transport}-{hosts}-{rate}-run{run}.json"
    return args.results / name


def run_all(args: argparse.Namespace) -> int:
    """Runs what is missing, one job after another; returns how many failed."""
    failed = 0
    for run, rate, hosts, transport, methods in jobs(args):
        load = os.getloadavg()[0]  # what others do here
        workers = run_job(args, rate, hosts, transport, methods)
        failed += not workers
        for method in methods if workers else ():
            found = join([worker[method] for worker in workers], args.task)
            found |= {"task": args.task, "hosts": hosts, "rate": rate}
            found |= {"method": method, "transport": transport, "run": run}
            found["load_before"] = load
            found |= {"batch_size": args.batch_size if args.task == "fit" else 0}
            found |= {"sleep": args.sleep}
            file = file_of(args, run, rate, hosts, transport, method)
            file.write_text(json.dumps(found, indent=1))
    return failed


def run_job(
    args: argparse.Namespace, rate: str, hosts: int, transport: str, methods: list[str]
) -> list[dict[str, Any]]:
    """Runs this script on all hosts; returns what each found, nothing if one failed."""
    import netlab

    name = f"{args.task} {' '.join(methods)} over {transport}, {hosts} at {rate}"
    start, log = time.monotonic(), args.results / f"{args.task}-{transport}.log"
    with (
        tempfile.TemporaryDirectory() as folder,
        log.open("wb") as output,
        netlab.Laboratory(hosts, **network_of(rate)) as lab,
    ):
        own = ["--worker", folder, "--transport", transport, "--methods", *methods]
        program = [sys.executable, str(HERE / "bench_network.py")]
        if transport == "gloo":
            program = [args.torch, str(HERE / "bench_ddp.py")]
        by_config = transport in ("collective", "gloo")
        status = lab.run(
            [*program, *sys.argv[1:], *own],
            launch="tf_config" if by_config else "horovodrun",
            timeout=args.timeout,
            environment={"TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=output,
            stderr=output,
        )
        texts = [f.read_text() for f in sorted(pathlib.Path(folder).iterdir())]
    if status or len(texts) != hosts:
        print(f"{name}: FAILED with status {status}, see {log}", flush=True)
        return []
    print(f"{name}: done in {time.monotonic() - start:.0f} s", flush=True)
    return [json.loads(text) for text in texts]


def network_of(rate: str) -> dict[str, str]:
    """Returns the arguments of a laboratory for RATE, RATE+DELAY or RATE+DELAY+LOSS."""
    parts = rate.split("+")
    if len(parts) > 3:
        raise ValueError(f"a network is RATE[+DELAY[+LOSS]]. Received: {rate}")
    return dict(zip(("rate", "delay", "loss"), parts, strict=False))


def join(workers: list[dict[str, Any]], task: str) -> dict[str, Any]:
    """Returns the figures of all workers as one: seconds, and mean bytes.

    The seconds are those of the slowest, where they start together, as in `exchange`.
    In `fit` none gets ahead of the others; from the end of a step to that of the next
    it takes all of them as long, on average.
    """
    joined, pick = dict(workers[0]), statistics.mean if task == "fit" else max
    steps = zip(*(worker["seconds"] for worker in workers), strict=True)
    joined["seconds"] = [pick(step) for step in steps]
    for name in COUNTED:
        steps = zip(*(worker[name] for worker in workers), strict=True)
        joined[name] = [statistics.mean(step) for step in steps]
    return joined


def expected_bytes(result: dict[str, Any]) -> float:
    """Returns what a worker puts on the wire in a step, by `stats()`; no headers.

    Of S bytes on N workers, a ring all-reduce sends 2 (N - 1) / N S from each worker; a
    ring all-gather passes all messages but one on: (N - 1) M. Of owners all receive as
    much as they send.
    """
    workers, size = result["hosts"], result["stats_sent"]
    method = result.get("choice", result["method"])
    if method == "owners":
        return float(result["stats_received"])
    sparse = method in ("dgc", "rounds", "flights")
    dense = result["uncompressed"] if sparse else size
    gathered = size - dense
    if method in ("alone", "apart", *DDP):
        return 0.0
    moved = result.get("activations", 0)
    return 2 * (workers - 1) / workers * dense + (workers - 1) * gathered + moved


def report(folder: pathlib.Path) -> None:
    """Writes table.md and plot.png about all results in a folder."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text())
        result = {"sleep": 0.0} | result
        groups.setdefault(tuple(result[key] for key in KEYS), []).append(result)
    if not groups:
        return
    medians = {
        key: statistics.median([s for run in runs for s in run["seconds"]])
        for key, runs in groups.items()
    }
    columns = ["task", "hosts", "rate", "row", "seconds", "lowest to highest", "steps"]
    columns += ["faster than dense/collective", "than dense/horovod"]
    columns += ["bytes sent on the wire", "by stats()", "ratio"]
    table = [columns, ["---"] * len(columns)]
    for key in sorted(groups):
        runs = groups[key]
        named = dict(zip(KEYS, key, strict=True))
        seconds = [s for run in runs for s in run["seconds"]]
        cells = [named["task"], named["hosts"], named["rate"]]
        row = f"{named['method']}/{named['transport']}"
        if choices := {run["choice"] for run in runs if "choice" in run}:
            row += f" ({', '.join(sorted(choices))})"
        cells += [row, f"{medians[key]:.4g}"]
        cells += [f"{min(seconds):.4g} to {max(seconds):.4g}", len(seconds)]
        for transport in ("collective", "horovod"):
            other = named | {"method": "dense", "transport": transport}
            dense = medians.get(tuple(other[name] for name in KEYS))
            cells.append(f"{dense / medians[key]:.1f}" if dense else "")
        sent = statistics.median([s for run in runs for s in run["sent"]])
        expected = expected_bytes(runs[0])
        cells += [f"{sent:,.0f}", f"{expected:,.0f}"]
        cells.append(f"{sent / expected:.3f}" if expected else "")
        table.append([str(cell) for cell in cells])
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw(medians, folder / "plot.png")


def compare(args: argparse.Namespace) -> tuple[list[str], int]:
    """Returns lines that compare `tf_dgc.advise` with `fit`, and how many jobs failed.

    It is told what the hosts measured while all of them were busy: the network's
    bandwidth and latency, and steps, by the slowest.
    """
    from tf_dgc import DGCConfig
    from tf_dgc.prediction import costs

    config, weights = DGCConfig(sparsity=SPARSITY), alexnet(args.width).weights
    tensors = costs.tensors_of(weights, config)
    lines = ["| hosts | rate | row | predicted | measured | ratio |", "|---" * 6 + "|"]
    failed = 0
    for hosts, rate in itertools.product(args.hosts, args.rates):
        workers = run_job(args, rate, hosts, "collective", ["probe"])
        if not workers:
            failed += 1
            continue
        each = zip(*(worker["measured"] for worker in workers), strict=True)
        measured = costs.Measured(*map(max, each))
        rounds = zip(*(worker["bandwidth"] for worker in workers), strict=True)
        waits = zip(*(worker["latency"] for worker in workers), strict=True)
        network = costs.Network(
            statistics.median(map(min, rounds)), statistics.median(map(max, waits))
        )
        print(f"{hosts} at {rate}: {network}, {measured}")
        predicted = costs.predict(measured, tensors, config, PERIOD, hosts, network)
        for row in args.rows:
            method, transport = row.split("/")
            runs = [
                file_of(args, run, rate, hosts, transport, method) for run in args.runs
            ]
            seconds, title = [], row
            for file in filter(pathlib.Path.exists, runs):
                result = json.loads(file.read_text())
                seconds += result["seconds"]
                if "choice" in result:
                    method = result["choice"]
                    title = f"{method}, chosen by {row}"
                    print(f"{hosts} at {rate}: {result['reason']}")
            if not seconds:
                continue
            found = predicted[{"dgc": "DGC"}.get(method, method)].seconds
            real = statistics.median(seconds)
            cells = f"{found:.4g} | {real:.4g} | {found / real:.2f}"
            lines.append(f"| {hosts} | {rate} | {title} | {cells} |")
    return lines, failed


def draw(medians: dict[tuple[Any, ...], float], file: pathlib.Path) -> None:
    """Draws the seconds of all rows, a panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [dict(zip(KEYS, key, strict=True)) | {"s": s} for key, s in medians.items()]
    tasks = [task for task in METHODS if any(each["task"] == task for each in found)]
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(7 * len(tasks), 5))
    for axis, task in zip([axes] if len(tasks) == 1 else axes, tasks, strict=True):
        own = [each for each in found if each["task"] == task]
        rows = sorted({(each["method"], each["transport"]) for each in own})
        places = sorted({(each["hosts"], each["rate"]) for each in own})
        for i, row in enumerate(rows):
            bars = [e for e in own if (e["method"], e["transport"]) == row]
            middle = (i - (len(rows) - 1) / 2) / (len(rows) + 1)
            xs = [places.index((e["hosts"], e["rate"])) + middle for e in bars]
            heights, width = [e["s"] for e in bars], 1 / (len(rows) + 1)
            drawn = axis.bar(xs, heights, width, label="/".join(row))
            axis.bar_label(drawn, fmt="%.2g", fontsize=7)
        labels = [f"{hosts} hosts\n{rate}" for hosts, rate in places]
        axis.set_xticks(range(len(places)), labels)
        what = "an exchange" if task == "exchange" else "a step of fit"
        axis.set(yscale="log", ylabel=f"seconds of {what}, median", title=task)
        axis.legend(fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=METHODS)
    parser.add_argument("--rows", nargs="*", metavar="METHOD/TRANSPORT", help="some of")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--rates",
        nargs="+",
        default=["1gbit", "100mbit"],
        metavar="RATE[+DELAY[+LOSS]]",
        help="networks, such as 1gbit or 20mbit+50ms+0.1%%",
    )
    parser.add_argument("--runs", type=int, nargs="+", default=[1], metavar="NUMBER")
    parser.add_argument("--steps", type=int, default=5, help="timed, of each run")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument(
        "--elements", type=int, default=25_000_000, help="exchange: of the gradient"
    )
    parser.add_argument(
        "--width", type=int, default=4096, help="fit: units of a hidden layer"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="fit: of a worker")
    parser.add_argument(
        "--sleep",
        type=float,
        default=0.0,
        help="fit: seconds of each step that take no processor, as of a GPU",
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a job")
    parser.add_argument("--results", type=pathlib.Path, default="bench_network")
    parser.add_argument(
        "--predict", action="store_true", help="compare `fit` with tf_dgc.advise"
    )
    parser.add_argument(
        "--torch",
        metavar="PYTHON",
        help="which has PyTorch, for rows over gloo",
    )
    for hidden in ("--worker", "--transport"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--methods", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rows = ROWS[args.task] if args.rows is None else args.rows
    for row in args.rows:
        method, _, transport = row.partition("/")
        if method not in METHODS[args.task] or transport not in TRANSPORTS:
            parser.error(
                f"`--rows` must be of {METHODS[args.task]} over {TRANSPORTS}, such as "
                f"{ROWS[args.task][0]}. Received: {row}"
            )
        if (method in DDP) != (transport == "gloo"):
            parser.error(f"{DDP} are over gloo, and no other. Received: {row}")
        if method in DDP and args.sleep:
            parser.error(f"{row} knows no `--sleep`")
        if method in DDP and not args.torch:
            parser.error(f"{row} needs `--torch PYTHON`")
    for name in ("steps", "warmup"):
        if getattr(args, name) < 1:
            parser.error(f"`--{name}` must be at least 1")
    if args.predict and (args.task != "fit" or min(args.hosts) < 2):
        parser.error("`--predict` is for `fit` on 2 or more hosts")
    return args


def main() -> int:
    """Runs and reports; returns the exit status."""
    args = arguments()
    if args.worker:
        task = {"exchange": exchange, "fit": fit}[args.task]
        found = (probe if args.methods == ["probe"] else task)(args)
        leave(args, found)
        return 0
    import netlab

    args.results.mkdir(parents=True, exist_ok=True)
    netlab.end_on_signals()
    try:
        failed = run_all(args)
        if args.predict:
            compared, lost = compare(args)
            failed += lost
    except (netlab.LabError, ValueError) as error:
        print(f"bench_network: {error}", file=sys.stderr)
        return 125
    report(args.results)
    if args.predict:
        print("\n".join(["", *compared]))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
