"""The same training step on two hosts: `torchrun` on each of two network namespaces, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Two hosts, a cable between them, and on each what README.md says to run. Within a user namespace,
# so that nobody need be root and nothing outside is touched; what runs there ends with the script.
HOSTS = """
set -euo pipefail
mount -t tmpfs hosts /run
ip link add cable0 type veth peer name cable1
for host in 0 1; do
    ip netns add host$host
    ip link set cable$host netns host$host
    ip -n host$host address add 10.99.0.1$host/24 dev cable$host
    ip -n host$host link set cable$host up
    ip -n host$host link set lo up
done
on_host() {
    GLOO_SOCKET_IFNAME=cable$1 nsenter --net=/run/netns/host$1 "$PYTHON" -m torch.distributed.run \\
        --nnodes 2 --node-rank $1 --nproc-per-node 2 --master-addr 10.99.0.10 --master-port 29500 \\
        -m tests.parallel.on_two_hosts
}
on_host 1 & other=$!
on_host 0
wait $other
"""


@pytest.mark.dist
def test_training_on_two_hosts_equals_one_process() -> None:
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "bash"],
        input=HOSTS,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal to one process\n"
