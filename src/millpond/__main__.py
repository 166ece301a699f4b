"""`python -m millpond`: the same as the command `millpond`."""

from millpond.launch import main

main()
