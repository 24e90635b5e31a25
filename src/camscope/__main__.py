"""`python -m camscope` runs the command line."""

from camscope.cli import main

if __name__ == "__main__":
    main()
