//go:build !race

package main

// raceDetector tells that tests run ten times as slow.
const raceDetector = false
