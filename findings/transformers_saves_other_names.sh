#!/usr/bin/env bash
# transformers 5.23.0 with torch 2.13.0 and safetensors 0.8.0.
#
# What save_pretrained writes is not the model's state_dict(). A Mixtral trains all experts
# of a layer in two tensors (gate_up_proj and down_proj of mlp.experts) and saves each
# expert's three matrices by themselves, under the names of the published checkpoints
# (block_sparse_moe.experts.N.w1 ...). So safetensors' load_model, load_state_dict, and
# whatever else reads such a folder by the model's names, finds none of the experts' and
# routers' weights, although the same library wrote them from the same model; the shapes
# differ, too. from_pretrained applies the rules of transformers.conversion_mapping in
# between, which nothing in the folder says. A Llama is saved by its own names, so that a
# loader tested with it alone seems right.
#
# Seen 2026-11-29:
#   LlamaForCausalLM: 21 of 21 names in the files are the model's
#   MixtralForCausalLM: 15 of 41 names in the files are the model's
#   block_sparse_moe.experts.0.w1.weight [24, 16], mlp.experts.gate_up_proj [4, 48, 16]
#   equal after from_pretrained: True
#
# Ends with 0 if that is still so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.3.5
cat > "$folder/names.py" <<'PY'
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import MixtralConfig, MixtralForCausalLM

small = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
)
llama = LlamaForCausalLM(LlamaConfig(**small))
mixtral = MixtralForCausalLM(MixtralConfig(**small, num_local_experts=4))
for model in (llama, mixtral):
    name = type(model).__name__
    model.save_pretrained(Path(sys.argv[1]) / name)
    saved = load_file(Path(sys.argv[1]) / name / "model.safetensors")
    own = model.state_dict()
    print(f"{name}: {len(saved.keys() & own)} of {len(saved)} names in the files are the model's")
there = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
here = "model.layers.0.mlp.experts.gate_up_proj"
print(
    there.removeprefix("model.layers.0."),
    [*saved[there].shape],
    end=", ",
)
print(here.removeprefix("model.layers.0."), [*own[here].shape])
again = MixtralForCausalLM.from_pretrained(Path(sys.argv[1]) / name).state_dict()
print("equal after from_pretrained:", all(torch.equal(own[k], again[k]) for k in own))
PY
"$folder/venv/bin/python" "$folder/names.py" "$folder" 2> "$folder/errors" > "$folder/seen" ||
    { cat "$folder/errors"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
LlamaForCausalLM: 21 of 21 names in the files are the model's
MixtralForCausalLM: 15 of 41 names in the files are the model's
block_sparse_moe.experts.0.w1.weight [24, 16], mlp.experts.gate_up_proj [4, 48, 16]
equal after from_pretrained: True
SEEN
echo "still so"
