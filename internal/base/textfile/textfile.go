// Package textfile reads small untrusted files, limits their content before it is decoded, and
// writes files.
package textfile

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
)

// Read returns the content of a file of at most most bytes. Only a regular file is read: a
// named pipe or a device may block, or never end. Errors do not name the file.
func Read(path string, most int64) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot read it: %w", errors.Unwrap(err))
	}
	defer func() { _ = file.Close() }()
	if info, err := file.Stat(); err != nil {
		return nil, fmt.Errorf("cannot read it: %w", errors.Unwrap(err))
	} else if !info.Mode().IsRegular() {
		return nil, errNoFile
	}
	data, err := io.ReadAll(io.LimitReader(file, most+1))
	if err != nil {
		return nil, fmt.Errorf("cannot read it: %w", errors.Unwrap(err))
	}
	if int64(len(data)) > most {
		return nil, fmt.Errorf("it exceeds %d bytes", most)
	}
	return data, nil
}

// Write makes a file of that content, or replaces the content of one. Only a regular file is
// written, and no symbolic link is followed: either may lead to what is not meant.
func Write(path string, data []byte, mode os.FileMode) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, mode)
	if errors.Is(err, syscall.ELOOP) {
		return fmt.Errorf("%s is a symbolic link: give the path of the file itself", path)
	}
	if err != nil {
		return err
	}
	if info, failed := file.Stat(); failed != nil {
		err = failed
	} else if !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	} else if err = file.Truncate(0); err == nil {
		_, err = file.Write(data)
	}
	return errors.Join(err, file.Close())
}

var errNoFile = errors.New("it is not a regular file")

// CheckRegular returns an error for what is not a regular file, or a link to one.
func CheckRegular(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("cannot read it: %w", errors.Unwrap(err))
	case !info.Mode().IsRegular():
		return errNoFile
	}
	return nil
}
