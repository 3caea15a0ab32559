#!/usr/bin/env python
"""Trains a model: composes the configuration, checks it and runs it.

    python train.py +experiment/demo=fox_pro output_dir=output/demo data_dir=data
    fabric run train.py --devices 4 +experiment/longcrawl64/forgetting_transformer=pro_760m_48b output_dir=… data_dir=…

The same as `python -m forgetting_transformer.train`; src/forgetting_transformer/train.py describes it.
"""

from forgetting_transformer import console

console.end_on_signals()  # importing takes a moment

from forgetting_transformer.train import main  # noqa: E402

if __name__ == "__main__":
    try:
        main()
    finally:
        console.ignore_signals()  # the exit code stands
