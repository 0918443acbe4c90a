"""Run the `marlaas` command with `python -m marlaas`."""

from marlaas.cli import main

if __name__ == "__main__":
    main()
