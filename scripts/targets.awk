# Prints the targets of the Makefile by group, each with its description: `target: needs ## group: description`.
# Targets marked #+ in place of ## are left out unless `all` is set.

match($0, / #[#+] [^:]*: /) {
    if (substr($0, RSTART + 2, 1) == "+" && !all) next
    target = substr($0, 1, index($0, ":") - 1)
    group = substr($0, RSTART + 4, RLENGTH - 6)
    if (!(group in text)) order[++count] = group
    text[group] = text[group] sprintf("  %-20s %s\n", target, substr($0, RSTART + RLENGTH))
}

END {
    for (i = 1; i <= count; i++) printf "%s\n%s\n", order[i], text[order[i]]
}
