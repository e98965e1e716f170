from ithaca.cli import main

main()
