"""One conversation turn, whatever API asked for it: prompt, grammar, and the answer split into its parts."""
