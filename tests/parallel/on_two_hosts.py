"""A training step on every process that `torchrun` starts; see test_two_hosts.py."""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed as dist

from tests.parallel.test_gradients import LAYOUTS, Training


def main() -> None:
    """EP over both hosts, then over each alone with experts' copies on the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hosts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.if_nameindex()[-1][1])
    assert len({*hosts}) == 2, hosts
    for name in ("ep 4", "ep 2, edp 2"):
        for way in ("plain", "fully_shard"):
            training = Training(LAYOUTS[name], way)
            for step in range(3):
                training.step(step)
            training.check()
    if dist.get_rank() == 0:
        sys.stdout.write("equal to one process\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
