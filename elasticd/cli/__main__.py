"""`python -m elasticd.cli` is elasticctl."""

from elasticd.cli.main import main

if __name__ == "__main__":
    main()
