#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining, CPU and gloo, two processes.
#
# A pipeline stage whose output is a view cannot be trained by a schedule that splits
# backwards (ScheduleInterleavedZeroBubble): stage_backward_input detaches the output in
# place, which autograd refuses for views. An nn.Linear with a bias returns a view for
# inputs of three dimensions (addmm on flattened rows, then view), and none for inputs of
# two, or without its bias. So a transformer stage that ends in its usual last Linear
# fails, the same layer without a bias trains, and ScheduleInterleaved1F1B trains both.
# The first and the last stage are not concerned: the one has no input gradient, the
# other's output is its loss. Here four stages are on two processes.
#
# Seen 2026-11-29:
#   whole backwards, bias: trained
#   whole backwards, none: trained
#   split backwards, bias: Can't detach views in-place
#   split backwards, none: trained
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/stages.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
torch.manual_seed(0)
x, y = torch.randn(8, 2, 4), torch.randn(8, 2, 4)


def outcome(is_split: bool, bias: bool) -> str:
    stages = [
        PipelineStage(nn.Linear(4, 4, bias=bias), number, 4, device)
        for number in (rank, rank + 2)
    ]
    kind = ScheduleInterleavedZeroBubble if is_split else ScheduleInterleaved1F1B
    schedule = kind(stages, 4, loss_fn=nn.MSELoss())
    try:
        schedule.step(x) if rank == 0 else schedule.step(target=y)
    except RuntimeError as error:
        text, cause = str(error), error
        while cause is not None:
            text, cause = text + str(cause), cause.__cause__ or cause.__context__
        known = "Can't detach views in-place"
        return known if known in text else text
    return "trained"


is_split, bias = sys.argv[1] == "split", sys.argv[2] == "bias"
with open(f"rank{rank}", "w") as file:
    file.write(outcome(is_split, bias))
dist.destroy_process_group()
PY
cd "$folder"
export OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
for kind in whole split; do
    for bias in bias none; do
        timeout 120 "$folder/venv/bin/torchrun" --nproc-per-node 2 --standalone \
            stages.py "$kind" "$bias" 2> errors || true
        # The other worker sees a closed connection.
        outcome=$(cat rank0 rank1)
        case "$outcome" in
            *"Can't detach views in-place"*) outcome="Can't detach views in-place" ;;
            trainedtrained) outcome="trained" ;;
        esac
        echo "$kind backwards, $bias: $outcome" | tee -a seen
    done
done
diff seen - <<'SEEN'
whole backwards, bias: trained
whole backwards, none: trained
split backwards, bias: Can't detach views in-place
split backwards, none: trained
SEEN
echo "still so"
