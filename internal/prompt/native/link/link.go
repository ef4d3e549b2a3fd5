// Package link links the native library into programs that import it: scripts/build-native.sh, which
// builds the library, writes linked.go beside this file. Without it the package is empty.
package link
