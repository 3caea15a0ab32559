"""`python -m forgetting_transformer.train`; also the file that jobs of a sweep are started with where there is no train.py."""

from forgetting_transformer.train import main

if __name__ == "__main__":
    main()
