#!/usr/bin/env bash
# A study on a corpus of the Python sources on this machine: its models, each with a learning-rate search and a run, their loss at
# every position, and their variants. A YAML file lists the models, budgets and seeds: studies/seven_models/study.yaml for
# studies/seven_models/README.md.
#
#   bash studies/study.sh FOLDER               everything; the same command continues where it stopped
#   bash studies/study.sh FOLDER corpus|train|evaluate|downstream|collect …    only these stages
#
# Uses all GPUs in CUDA_VISIBLE_DEVICES, or all there are, and `python` (PYTHON=… names another), with this project
# installed. Results are in FOLDER/report. A stage does what it can with what is there and says what it skips;
# the exit code is not 0 if something failed. Settings, as environment variables:
#
#   SECONDS_TO_TRAIN   `train` saves its runs after so many seconds and ends, which is not a failure; the same command
#                      continues them (default: never)
#   STUDY              the YAML of the study. The variables below override it:
#   TOKENS             budget of the runs
#   SEARCH_TOKENS      budget of the runs of the learning-rate searches
#   ABLATION_TOKENS    budget of the variants, 0 for none
#   RUNS               0 leaves out the runs of the models, which another folder has: only the variants are trained, at the
#                      learning_rates of the study; `studies/report.py join` makes one report of both
#   SEEDS              of the runs and variants, as in "0 1 2"; the searches, speeds and shares pruned are of the first, which
#                      must stay the first when seeds are added
#   JOBS_PER_GPU       jobs that share a GPU: one starts while others compute
#   EVAL_JOBS          evaluations that share a GPU (default 4)
#   MODELS             the slowest first
#   SOURCES            folders with the texts of the corpus, without near-duplicates; VOCABULARY, DOC_LEN, HELDOUT_DOCS
#   GLOB               which of their files are read (default: *.py)
#   OVERRIDES          more overrides of train.py for all runs, without spaces. Plug-ins, as in OVERRIDES="plugins=[my_lab]", are found
#                      in the current folder too, and evaluations and the report get them as well
#   SPEED_SEEDS        seeds whose speeds are measured (default: the first; empty for none)
#   QUESTIONS          of the tasks that `downstream` makes of held-out texts (default: 500); the same for all models
#   NEEDLE             options of eval/niah/run_niah.py: lengths, depths and so on of the needle in a haystack
#   LONGBENCH_DATA     LongBench's own data, which is then answered too; LM_EVAL_TASKS names tasks of lm_eval, with commas
#                      between them, whose data is in the cache of Hugging Face
set -euo pipefail
# Ctrl-C, which training answers by saving, must not lead to the next stage.
trap 'exit 130' INT
usage() { sed -n '2,/^set /{/^#/p;}' "$0"; }
wrong() { echo "error: $*" >&2; exit 2; }
[ $# -ge 1 ] || { usage; exit 2; }
case $1 in -h | --help) usage; exit 0 ;; esac
[ -n "$1" ] || wrong "FOLDER is empty (a variable that is not set?); give a folder"
# All of this is looked at before the first stage, which may take hours.
for stage in "${@:2}"; do
    [[ " corpus train evaluate downstream collect " == *" $stage "* ]] ||
        wrong "stages are corpus, train, evaluate, downstream and collect, not $stage"
done
for name in TOKENS SEARCH_TOKENS SECONDS_TO_TRAIN EVAL_JOBS JOBS_PER_GPU VOCABULARY DOC_LEN HELDOUT_DOCS EVAL_BATCH SPEED_LEN \
    SPEED_BATCH QUESTIONS; do
    [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || wrong "$name=${!name}: give a number, 1 or more, in digits alone"
done
[[ ${ABLATION_TOKENS:-0} =~ ^(0|[1-9][0-9]*)$ ]] || wrong "ABLATION_TOKENS=$ABLATION_TOKENS: give a number of tokens, in digits alone"
[ -z "${STUDY:-}" ] || [ -f "$STUDY" ] || wrong "STUDY=$STUDY: there is no such file"
[ -z "${STUDY:-}" ] || STUDY=$(realpath "$STUDY")
# Only the stages that read them look for these. Links stay as they are: the corpus remembers the names of its sources.
wants() { # stage, among these; none are all
    [ $# -eq 1 ] || [[ " ${*:2} " == *" $1 "* ]]
}
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac }
if [ -n "${LONGBENCH_DATA:-}" ] && wants downstream "${@:2}"; then
    [ -e "$LONGBENCH_DATA" ] || wrong "LONGBENCH_DATA=$LONGBENCH_DATA: there is no such file or folder in $PWD"
    LONGBENCH_DATA=$(absolute "$LONGBENCH_DATA")
fi
read -ra sources <<<"${SOURCES:-}"
if wants corpus "${@:2}"; then
    for number in "${!sources[@]}"; do
        [ -e "${sources[number]}" ] || wrong "SOURCES=$SOURCES: there is no ${sources[number]} in $PWD"
        sources[number]=$(absolute "${sources[number]}")
    done
fi
read -ra overrides <<<"${OVERRIDES:-}"
root="$(cd "$(dirname "$0")/.." && pwd)"
python=${PYTHON:-python}
command -v "$python" >/dev/null || wrong "there is no command $python; set PYTHON to the Python that has this project"
# Plug-ins lie where the script is started. There they do not hide modules of Python, as they would on PYTHONPATH.
export FORGETTING_TRANSFORMER_PLUGINS="$PWD"
named=$("$python" -c 'import sys
from forgetting_transformer.plugins import PluginError, named_in
try:
    print(*named_in(sys.argv[1:]))
except PluginError as error:
    sys.exit(f"error: OVERRIDES: {error}; without spaces")' "${overrides[@]}") || exit 2
read -ra plugins <<<"$named"
[ ${#plugins[@]} -eq 0 ] || plugins=(--plugins "${plugins[@]}")
study=${STUDY:-$root/studies/seven_models/study.yaml}
# What the study says, in a line each: models, the slowest first; seeds; the group of its experiments.
says=$("$python" -c 'import sys
from pathlib import Path
from studies.engine.plan import read_plan
try:
    plan = read_plan(Path(sys.argv[1]))
except ValueError as error:
    sys.exit(f"error: {error} (STUDY names the YAML of a study)")
print(*plan.start_order); print(*plan.seeds); print(plan.group)' "$study") || exit 2
mapfile -t plan <<<"$says"
mkdir -p "$1/logs" "$1/speed"
folder="$(cd "$1" && pwd)"
[ ! -s "$folder/study.lock" ] || [[ $(head -c 100 "$folder/study.lock") =~ ^[0-9]+$ ]] ||
    wrong "$folder/study.lock is not a lock of study.sh, which would write into it; choose another folder, or move the file"
# The lock is this process's and its children's, and is gone with them, however they end.
exec 9<>"$folder/study.lock"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    echo "error: another study.sh (process $(cat <&9)) is at work in $folder; wait for it, or choose another folder" >&2
    exit 1
fi
echo $$ >"$folder/study.lock"
stages=("${@:2}")
[ ${#stages[@]} -gt 0 ] || stages=(corpus train evaluate downstream collect)
cd "$root"
export HF_HUB_OFFLINE=1

vocabulary=${VOCABULARY:-8192}
read -ra models <<<"${MODELS:-${plan[0]:-}}"
read -ra seeds <<<"${SEEDS:-${plan[1]:-0}}"
group=${plan[2]:-study}
[[ "${seeds[*]}" =~ ^[0-9]+(\ [0-9]+)*$ ]] || wrong "SEEDS=$SEEDS: give numbers, as in SEEDS=\"0 1 2\""
read -ra speed_seeds <<<"${SPEED_SEEDS-${seeds[0]}}"
for seed in "${speed_seeds[@]}"; do
    [[ " ${seeds[*]} " == *" $seed "* ]] || wrong "SPEED_SEEDS=$SPEED_SEEDS: give some of the seeds, ${seeds[*]}"
done
[[ ${RUNS:-1} =~ ^[01]$ ]] || wrong "RUNS=$RUNS: give 0 or 1"
[ "${RUNS:-1}" != 0 ] || [ "${ABLATION_TOKENS:-}" != 0 ] || wrong "RUNS=0 and ABLATION_TOKENS=0 leave nothing to train"
eval_jobs=${EVAL_JOBS:-4}
corpus="$folder/data/python_code"
mapfile -t gpus < <("$python" -c 'from forgetting_transformer.sweep.runner import visible_gpus as v; print("\n".join(v()))')
[ -n "${gpus[0]:-}" ] || gpus=("")
cores=$(nproc)
# Of the script: that of the last stage that failed.
status=0
step() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# Runs the named function for each run of the models with these seeds, `jobs` of them at a time on every GPU; fails if one of
# them did.
for_each_run() { # jobs function seed …
    local jobs=$1 action=$2 number=0 names=() pids=() pid name seed model failed=0
    for seed in "${@:3}"; do
        for model in "${models[@]}"; do names+=("${model}_seed$seed"); done
    done
    local slots=$((jobs * ${#gpus[@]}))
    for ((slot = 0; slot < slots; slot++)); do
        (
            export OMP_NUM_THREADS=$((cores / slots > 0 ? cores / slots : 1))
            [ -z "${gpus[0]}" ] || export CUDA_VISIBLE_DEVICES=${gpus[slot % ${#gpus[@]}]}
            for ((number = slot; number < ${#names[@]}; number += slots)); do
                name=${names[number]}
                if [ ! -d "$folder/runs/$name/checkpoints" ]; then
                    echo "$action of $name is skipped: there is no such run yet"
                elif ! "$action" "$name"; then
                    echo "$action of $name failed: $folder/logs/$action-$name.log" >&2
                    failed=1
                fi
            done
            exit "$failed"
        ) &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || failed=1
    done
    return "$failed"
}

has_runs() {
    local run
    for run in "$folder"/runs/*/checkpoints; do [ ! -d "$run" ] || return 0; done
    return 1
}

# Whether a file is newer than the checkpoints of a run, so that it need not be made again.
is_current() { # file run
    [ "$1" -nt "$folder/runs/$2/checkpoints" ] && echo "${1#"$folder"/} is there already"
}

# While the CPUs make the corpus, the GPUs are idle: kernels that are compiled now are in the disk caches when runs start.
compile_kernels() {
    local number
    [ -n "${gpus[0]}" ] && [ "${RUNS:-1}" != 0 ] && [ ${#overrides[@]} -eq 0 ] && [ ! -d "$folder/search" ] && [ ! -d "$folder/runs" ] || return 0
    for number in "${!models[@]}"; do
        CUDA_VISIBLE_DEVICES=${gpus[number % ${#gpus[@]}]} OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 \
            timeout 120 "$python" benchmarks/training.py --experiments "$group/${models[number]}" --vocab_size "$vocabulary" \
            --seq_len 4096 --batch_size 16 --checkpointing off --steps 1 --warmup_steps 1 \
            >"$folder/logs/compile-${models[number]}.log" 2>&1 || true &
    done
}

make_corpus() {
    if [ ${#sources[@]} -eq 0 ]; then
        mapfile -t sources < <("$python" -c 'import sysconfig; p = sysconfig.get_paths(); print(p["stdlib"], p["purelib"], sep="\n")')
    fi
    local dedup=(--dedup) begun
    for begun in "$corpus/manifest.json" "$corpus/.work/settings.json"; do
        if [ -f "$begun" ] && ! grep -q '"dedup": 0' "$begun"; then
            echo "$corpus was begun without --dedup, as by earlier versions, and stays so"
            dedup=()
        fi
    done
    "$python" scripts/prepare_data.py "${sources[@]}" --glob "${GLOB:-*.py}" --tokenizer "train:$vocabulary" \
        "${dedup[@]}" --doc_len "${DOC_LEN:-16384}" --heldout_docs "${HELDOUT_DOCS:-128}" --out "$corpus"
}

train() {
    local shared=() search=() variants=()
    if [ -n "${TOKENS:-}" ]; then shared+=("train.max_tokens=$TOKENS" "schedule.warmup_tokens=$((TOKENS / 20))"); fi
    if [ -n "${SEARCH_TOKENS:-}" ]; then
        search+=(--search "train.max_tokens=$SEARCH_TOKENS" "schedule.warmup_tokens=$((SEARCH_TOKENS / 8))"
            "log_interval=$((SEARCH_TOKENS / 96))")
    fi
    if [ "${ABLATION_TOKENS:-}" = 0 ]; then
        variants+=(--no_variants)
    elif [ -n "${ABLATION_TOKENS:-}" ]; then
        variants+=(--variant "train.max_tokens=$ABLATION_TOKENS" "schedule.warmup_tokens=$((ABLATION_TOKENS / 16))")
    fi
    [ "${RUNS:-1}" != 0 ] || variants+=(--no_runs)
    ${SECONDS_TO_TRAIN:+timeout --foreground --signal=TERM "$SECONDS_TO_TRAIN"} "$python" -m studies.run \
        "output_dir=$folder" "data_dir=$folder/data" fabric.devices=1 "hydra.launcher.jobs_per_gpu=${JOBS_PER_GPU:-3}" \
        "${shared[@]}" "${overrides[@]}" \
        --study "$study" --models "${models[@]}" --seeds "${seeds[@]}" "${search[@]}" "${variants[@]}"
}

position_loss() { # run
    local results="$folder/position_loss/$1" resume=()
    ! is_current "$results/results.json" "$1" || return 0
    # An evaluation of weights that have been trained further since is of no use.
    [ "$results/state/sums.npz" -nt "$folder/runs/$1/checkpoints" ] || resume=(--no-resume)
    "$python" eval/per_token_loss/run_per_token_loss.py --model_path "$folder/runs/$1" --data_path "$corpus" \
        --save_dir "$folder/position_loss" --preset extrapolation --local_batch_size "${EVAL_BATCH:-4}" \
        "${resume[@]}" "${plugins[@]}" >"$folder/logs/position_loss-$1.log" 2>&1
}

speed() { # run
    measure_speed "$1" "$folder/speed/$1.json" || return
    # What pruning is worth: the same weights without it.
    ! grep -qs 'log_pruning_tolerance: -' "$folder/runs/$1/config.yaml" ||
        measure_speed "$1" "$folder/speed/unpruned/$1.json" --overrides model.config.log_pruning_tolerance=null
}

measure_speed() { # run results option …
    local run=$1 results=$2
    ! { [ -f "$results" ] && grep -q '"status": "ok"' "$results" && is_current "$results" "$run"; } || return 0
    mkdir -p "$(dirname "$results")"
    "$python" benchmarks/training.py --experiments "$folder/runs/$run" --seq_len "${SPEED_LEN:-4096}" \
        --batch_size "${SPEED_BATCH:-16}" --checkpointing off --optimizer_step --steps 5 --time_limit 120 --replace \
        --out "$results" "${plugins[@]}" "${@:3}" >>"$folder/logs/speed-$run.log" 2>&1
}

# Whether there is nothing to ask of a run: it is not finished, or has been asked. Answers of older weights are moved aside,
# since users may have put files of their own beside them.
is_asked() { # file of results, in their folder; run
    if ! grep -qs '"status": "done"' "$folder/runs/$2/status.json"; then
        echo "downstream tasks of $2 are skipped: it is not finished"
        return 0
    fi
    ! is_current "$1" "$2" || return 0
    local results=${1%/*} aside number=1
    # Only what an evaluation wrote has its settings.
    [ -f "$results/settings.json" ] && [ ! "$results/settings.json" -nt "$folder/runs/$2/checkpoints" ] || return 1
    aside="$folder/downstream/previous/${results#"$folder/downstream/"}"
    while [ -e "$aside.$number" ]; do number=$((number + 1)); done
    echo "answers of older weights are in ${aside#"$folder"/}.$number now"
    mkdir -p "$(dirname "$aside")" && mv "$results" "$aside.$number"
    return 1
}

# Only the words right after the prompt are scored, so that the paper's 1,024 tokens of an answer would be a waste.
needle() { # run
    local mode options
    read -ra options <<<"${NEEDLE:---max_length 8000 --num_lengths 8 --num_depths 6}"
    for mode in paper paper_easy; do
        is_asked "$folder/downstream/needle/$1/$mode/scores.json" "$1" ||
            "$python" eval/niah/run_niah.py --model_path "$folder/runs/$1" --mode "$mode" --max_new_tokens 64 \
                --local_batch_size 6 --save_dir "$folder/downstream/needle" "${plugins[@]}" "${options[@]}" \
                >>"$folder/logs/needle-$1.log" 2>&1 || return
    done
}

# Writing the next line of code, and LongBench's own sets where their data is.
longbench() { # run
    is_asked "$folder/downstream/next_line/$1/results.json" "$1" ||
        "$python" eval/longbench/run_longbench.py --model_path "$folder/runs/$1" --data_dir "$folder/tasks" --sets lcc \
            --save_dir "$folder/downstream/next_line" "${plugins[@]}" >>"$folder/logs/longbench-$1.log" 2>&1 || return
    [ -z "${LONGBENCH_DATA:-}" ] || is_asked "$folder/downstream/longbench/$1/results.json" "$1" ||
        "$python" eval/longbench/run_longbench.py --model_path "$folder/runs/$1" --data_dir "$LONGBENCH_DATA" \
            --save_dir "$folder/downstream/longbench" "${plugins[@]}" >>"$folder/logs/longbench-$1.log" 2>&1
}

# Choosing the next line of code, and lm_eval's own tasks where their data is.
lm_eval() { # run
    is_asked "$folder/downstream/lm_eval/$1/results.json" "$1" ||
        "$python" eval/lm_eval_harness/run_lm_eval.py --model_path "$folder/runs/$1" --include_path "$folder/tasks" \
            --tasks "next_line${LM_EVAL_TASKS:+,$LM_EVAL_TASKS}" --batch_size 16 --save_dir "$folder/downstream/lm_eval" \
            "${plugins[@]}" >>"$folder/logs/lm_eval-$1.log" 2>&1
}

for stage in "${stages[@]}"; do
    if [[ $stage == evaluate || $stage == downstream ]] && ! wants train "${stages[@]}" && ! has_runs; then
        echo "error: $stage: $folder has no runs; give the FOLDER that they were trained in, or run the stage train first" >&2
        status=1
        continue
    fi
    case "$stage" in
    corpus)
        step "corpus"
        compile_kernels
        make_corpus
        wait
        ;;
    train)
        step "training"
        code=0
        train || code=$?
        case $code in
        0) ;;
        124) step "training was stopped after $SECONDS_TO_TRAIN s; the same command goes on with it" ;;
        *) step "training is not complete: exit code $code" && status=$code ;;
        esac
        ;;
    evaluate)
        step "loss at every position"
        for_each_run "$eval_jobs" position_loss "${seeds[@]}" || status=1
        [ ${#speed_seeds[@]} -eq 0 ] || step "tokens per second, each model alone on a GPU"
        for_each_run 1 speed "${speed_seeds[@]}" || status=1
        ;;
    downstream)
        step "needle in a haystack"
        for_each_run "$eval_jobs" needle "${seeds[@]}" || status=1
        step "next line of code"
        # Every time: it refuses if the questions were to become others than those that models have answered.
        if ! "$python" -m studies.code_tasks --data_path "$corpus" --questions "${QUESTIONS:-500}" --out "$folder/tasks"; then
            echo "no model is asked for the next line of code, and none of LongBench and lm_eval: see the error above. For other" \
                "QUESTIONS, move $folder/tasks and $folder/downstream away; for the same ones, set QUESTIONS as before" >&2
            status=1
            continue
        fi
        for_each_run "$eval_jobs" longbench "${seeds[@]}" || status=1
        if "$python" -c 'import lm_eval' 2>/dev/null; then
            for_each_run "$eval_jobs" lm_eval "${seeds[@]}" || status=1
        else
            echo "lm_eval is skipped: it is an extra, pip install -e '.[eval]'"
        fi
        ;;
    collect)
        step "report"
        shopt -s nullglob
        "$python" -m studies.report collect "$folder" --plan "$study" --data_path "$corpus" --position_loss "$folder/position_loss" \
            --speed "$folder"/speed/*.json "$folder"/speed/unpruned/*.json \
            --downstream "$folder/downstream" --out "$folder/report" "${plugins[@]}" || status=$?
        ;;
    esac
done
step "done$([ $status -eq 0 ] || echo ", not everything worked")"
exit "$status"
