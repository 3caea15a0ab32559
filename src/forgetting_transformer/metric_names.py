"""Names of the numbers that a run logs, in files under `metrics/` and in wandb.

A name is `<kind>/<name>`, so that no two kinds share one. The writer of a number and its readers take the name from
here. docs/operations.md lists the contents of each kind.
"""

# Kinds of lines: metrics/jsonlines/<kind>.jsonl.
TRAIN, TRAIN_EVAL, VAL = "train", "train_eval", "val"
THROUGHPUT, NORM, GOODPUT, CHECKPOINT = "throughput", "norm", "goodput", "checkpoint"
BAD_STEP, RESUME = "bad_step", "resume"
MODEL_INFO, TRAIN_DATA_INFO, VAL_DATA_INFO = "model_info", "train_data_info", "val_data_info"
LM_EVAL, NEEDLE, GATES = "lm_eval", "needle", "gates"


def name_of(kind: str, *parts: str) -> str:
    """The name of a number of one kind: ("train", "lr") -> "train/lr"."""
    return "/".join((kind, *parts))


def per_second(count: str, clock: str, span: str) -> str:
    """The name of a rate.

    Args:
        count: "token_count", "batch_count" or "flop_count".
        clock: "total" with evaluations and checkpoints, "update" without.
        span: "recent" for the last steps, "cum" for the whole run.
    """
    return name_of(THROUGHPUT, f"{count}_per_second_{clock}_{span}")


def mfu(clock: str, span: str) -> str:
    """The name of a model FLOPs utilisation; the arguments are those of `per_second`."""
    return name_of(THROUGHPUT, f"mfu_{clock}_{span}")


TRAIN_LOSS = name_of(TRAIN, "loss")
LEARNING_RATE = name_of(TRAIN, "lr")
GRADIENT_NORM = name_of(TRAIN, "global_grad_norm")
PEAK_MEMORY = name_of(THROUGHPUT, "peak_memory_bytes")

# Parts that come after a kind of held-out losses, as in "val/loss".
LOSS = "loss"
TOKENS_EVALUATED = "val_token_count"
FINGERPRINT = "fingerprint"
#: A counter of training at the time of an evaluation comes after it, as in "val/train_total_time".
COUNTER = "train_"
# The number of the first positions comes after them, as in "val/loss_avg_len_512".
LOSS_OVER, PERPLEXITY_OVER = "loss_avg_len_", "perplexity_len_"
#: The array in metrics/npz/<kind>/step-*.npz.
LOSS_PER_TOKEN = "loss_per_token"

# Hours of goodput: all other names of its kind are shares of them.
HOURS = "hours"

# Kinds within the lines of `norm`: "pnorm/<parameter>".
PARAMETER_NORM, GRADIENT_NORM_OF_PARAMETER = "pnorm", "gnorm"

#: Ending of the name of a score that is the standard error of another.
STANDARD_ERROR = "_stderr"
# Settings that a test in training reports besides its scores.
CHANCE, EXAMPLES, MAX_LENGTH = "chance", "examples", "max_length"
MODE, DEPTHS, PROMPTS = "mode", "depths", "samples"
#: A length of needle prompts comes after it, as in "needle/length_512/loss".
LENGTH = "length_"
ANSWER_LOSS, LOSS_WITHOUT_NEEDLE, ACCURACY = "loss", "loss_without", "accuracy"
#: Memory lengths of the heads of a model.
SHORTEST, MEDIAN, LONGEST = (name_of(GATES, which) for which in ("shortest", "median", "longest"))
