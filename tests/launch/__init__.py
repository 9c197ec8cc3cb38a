"""Do the launchers start, watch and end real jobs, and write files that do?"""
