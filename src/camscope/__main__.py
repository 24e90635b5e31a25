"""`python -m camscope` is `camscope`."""

from camscope.cli import main

if __name__ == "__main__":
    main()
