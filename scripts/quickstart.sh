#!/usr/bin/env bash
# From nothing to a trained model on one machine without a GPU: three and a half minutes on two cores after the installation.
#
#   bash scripts/quickstart.sh            everything goes to ./quickstart
#   bash scripts/quickstart.sh FOLDER     … or to FOLDER
#
# It installs into .venv, then 1 turns the Python sources on this machine into a corpus  2 trains a small FoX (Pro)
# 3 draws its loss  4 exports it to Hugging Face format, loads that and lets it write. Run again, it continues.
set -euo pipefail
mkdir -p "${1:-quickstart}"
folder="$(cd "${1:-quickstart}" && pwd)"
cd "$(dirname "$0")/.."
source scripts/environment.sh
export HF_HUB_OFFLINE=1
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" # threads that wait sleep: spinning, they slow each other down on a busy machine
echo "Two cores of an AMD EPYC took 25 s for the corpus, 160 s for training, 10 s for the plots, 15 s for export and generation."
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/4  Corpus: Python sources of the interpreter and of the installed packages -> $folder/data/python_code"
mapfile -t sources < <(python -c 'import sysconfig; p = sysconfig.get_paths(); print(p["stdlib"], p["purelib"], sep="\n")')
python scripts/prepare_data.py "${sources[@]}" --glob "*.py" --max_bytes 24000000 \
    --tokenizer train:4096 --doc_len 4096 --heldout_docs 32 --out "$folder/data/python_code"

step "2/4  Training: python train.py +experiment/demo=fox_pro, 160 steps of its 384"
python train.py +experiment/demo=fox_pro train.max_tokens=655360 schedule.warmup_tokens=65536 eval_interval=655360 \
    output_dir="$folder/run" data_dir="$folder/data"

step "3/4  Plots"
python scripts/plot_run.py "$folder/run"

step "4/4  Export to $folder/hf and generation"
python save_model.py --hf_load_dir "$folder/run" --hf_save_dir "$folder/hf"
python scripts/generate.py "$folder/hf" --prompt $'import os\n\n\ndef read_lines(path):\n    ' --max_new_tokens 96 --temperature 0.7
printf '\nEverything is in %s. Next: docs/train.md\n' "$folder"
