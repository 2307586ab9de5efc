"""What most tests on ranks need, imported: ranks are forked from a process that has imported this.

No thread, group or device may come to be here, nor a backward: autograd's threads do not outlive a
fork.
"""

from __future__ import annotations

import gc

import functorch.compile  # noqa: F401
import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx

import fx_passes  # noqa: F401
import moe_ops.nn
import moe_ops.testing  # noqa: F401

# The first compilation imports a hundred modules. With CUDA it would start that, too.
if torch.version.cuda is None:
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(1))
    torch._dynamo.reset()
gc.collect()
gc.freeze()  # in a rank the collector looks at what the rank makes
