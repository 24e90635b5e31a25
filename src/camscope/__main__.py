"""`python -m camscope` is `camscope_version`."""

from camscope.cli import main

if __name__ == "__main__":
    main()
