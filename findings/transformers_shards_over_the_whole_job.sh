#!/usr/bin/env bash
# transformers 5.23.0 with torch 2.13.0, CPU, gloo.
#
# `from_pretrained(folder, tp_plan="auto", device_mesh=mesh["tp"])` takes a device mesh, and
# its documentation says that tensor parallelism uses it. With a tp_plan a mesh of its own
# over all ranks of the job takes its place, without a word: in a job of four ranks with a
# mesh (pp, tp) of (2, 2), weights are split in four, not in two, and the model's mesh is
# not the one that was given. Whoever combines it with a pipeline or with data parallelism
# finds it out where heads no longer divide, or not at all: each rank then holds another
# quarter, also of what its pipeline stage is to hold half of. `tp_size=2` raises, since
# the job has four ranks. Load the model whole, and call torch's `parallelize_module`.
#
# Seen 2026-11-30, q_proj.weight of 32 x 32, on rank 0 of 4:
#   given: mesh of ranks [0, 1]
#   found: mesh of ranks [0, 1, 2, 3], 8 x 32 here
#   tp_size=2: The parallel mesh requires 2 processes, but world_size is 4.
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.23.0 accelerate==1.15.0
cat > "$folder/meshes.py" <<'PY'
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

SIZE = 4


def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"


def work(rank, folder):
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(SIZE))
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    options = {"tp_plan": "auto", "device_mesh": mesh}
    net = LlamaForCausalLM.from_pretrained(f"{folder}/llama", **options)
    weight = net.model.layers[0].self_attn.q_proj.weight
    rows, columns = weight.to_local().shape
    text = error_of(
        lambda: LlamaForCausalLM.from_pretrained(
            f"{folder}/llama", tp_plan="auto", tp_size=2
        )
    )
    if rank == 0:
        print("given: mesh of ranks", mesh.mesh.tolist())
        print("found: mesh of ranks", weight.device_mesh.mesh.tolist(), end="")
        print(f", {rows} x {columns} here")
        print("tp_size=2:", text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(f"{sys.argv[1]}/llama")
    mp.spawn(work, (sys.argv[1],), SIZE)
PY
timeout 300 "$folder/venv/bin/python" "$folder/meshes.py" "$folder" \
    2> "$folder/errors" > "$folder/seen" || { cat "$folder/errors"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
given: mesh of ranks [0, 1]
found: mesh of ranks [0, 1, 2, 3], 8 x 32 here
tp_size=2: The parallel mesh requires 2 processes, but world_size is 4.
SEEN
echo "still so"
