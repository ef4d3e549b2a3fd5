//go:build !cgo

package library
