"""`python -m forgetting_transformer.train`. Jobs of a sweep run this file where there is no train.py."""

from forgetting_transformer.train import main

if __name__ == "__main__":
    main()
