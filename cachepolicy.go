package main

// CacheKnobs are the settings of the policies cache-threshold and variance.
type CacheKnobs struct{}
