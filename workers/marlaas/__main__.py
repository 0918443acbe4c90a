"""`python -m marlaas` is the `marlaas` command."""

from marlaas.cli import main

if __name__ == "__main__":
    main()
