"""What PyTorch's DistributedDataParallel takes for the steps of bench_network.py's fit.

Started by bench_network.py on each host, for rows over `gloo`, with a Python that has
PyTorch: tf_dgc needs none.

    ddp        the gradients of all are averaged in every step
    powersgd   of rank 1, by DDP's own hook; powersgd_2 of rank 2
    local_sgd  each trains by itself, and weights are averaged every 16 steps, by DDP's
               own hook and optimizer (post-local SGD)

A process of PyTorch takes one thread, as there are more hosts than processors.

References:
    Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, https://arxiv.org/abs/1905.13727
    Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020,
    https://arxiv.org/abs/1808.07217
"""

import argparse
import json
import os
import time
from typing import Any

import bench_network
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

# The hook of PowerSGD waits for a sum within the callback of another, on one of gloo's
# two threads: several buckets at once wait for each other for ever.
ONE_BUCKET = 1 << 20  # MiB
DENSE_STEPS = 2  # the least that the hook of PowerSGD begins with


def join_others() -> None:
    """Meet the other hosts, which TF_CONFIG names."""
    config = json.loads(os.environ["TF_CONFIG"])
    hosts = [worker.split(":")[0] for worker in config["cluster"]["worker"]]
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = distributed.TCPStore(
        hosts[0], bench_network.RING_PORT, len(hosts), config["task"]["index"] == 0
    )
    distributed.init_process_group(
        "gloo", store=store, rank=config["task"]["index"], world_size=len(hosts)
    )


def fit(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return what this worker measured."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    width, classes = args.width, bench_network.CLASSES
    model = nn.Sequential(
        *(nn.Linear(width * 9 // 4, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, classes),
    )
    elements = sum(parameter.numel() for parameter in model.parameters())
    low_rank = {"powersgd": 1, "powersgd_2": 2}.get(method)
    bucket = ONE_BUCKET if low_rank else None
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket)
    sgd = torch.optim.SGD(parallel.parameters(), 0.01, bench_network.MOMENTUM)
    optimizer: Any = sgd
    if low_rank:
        state = powerSGD_hook.PowerSGDState(
            None, low_rank, start_powerSGD_iter=DENSE_STEPS
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method == "local_sgd":
        # Each host's own group: nothing is exchanged but what the averager does.
        own, _ = distributed.new_subgroups(1)
        local = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=1)
        parallel.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(bench_network.PERIOD, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(sgd, averager)
    rows = torch.randn(args.batch_size, width * 9 // 4)
    labels = torch.randint(0, classes, (args.batch_size,))
    loss = nn.CrossEntropyLoss()
    timed = bench_network.timed_steps(args, method)
    ends = []
    for _ in range(args.warmup + timed):
        optimizer.zero_grad()
        loss(parallel(rows), labels).backward()
        optimizer.step()
        ends.append((time.perf_counter(), *bench_network.counted()))
    result = bench_network.by_step(ends, args, method)
    return result | {
        "stats_sent": 0,
        "stats_dense": 4 * elements,
        "uncompressed": 0,
        "elements": elements,
    }


def main() -> None:
    """Measure, and leave a file."""
    args = bench_network.arguments()
    join_others()
    (method,) = args.methods
    bench_network.leave(args, {method: fit(args, method)})
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
