package main

// ThompsonKnobs are the settings of policy thompson.
type ThompsonKnobs struct{}
