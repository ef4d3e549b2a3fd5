package netspace

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"unsafe"
)

// errRefused: the kernel, or who runs the test, does not permit it.
var errRefused = errors.New("refused")

// refused says what was refused. err may be nil.
func refused(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrPermission), errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.ENXIO),
		errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EUSERS), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENOSYS),
		errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("%s was %w: %w", what, errRefused, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

const (
	deviceName = "far0"
	tunPath    = "/dev/net/tun"
)

// ifreq is struct ifreq of netdevice(7).
type ifreq struct {
	name [syscall.IFNAMSIZ]byte
	data [24]byte
}

func newIfreq(name string) (r ifreq) {
	copy(r.name[:syscall.IFNAMSIZ-1], name)
	return r
}

// setFlags sets the field ifr_flags.
func (r *ifreq) setFlags(flags uint16) { *(*uint16)(unsafe.Pointer(&r.data)) = flags }

// setAddress sets the field ifr_addr, or ifr_netmask.
func (r *ifreq) setAddress(address netip.Addr) {
	*(*syscall.RawSockaddrInet4)(unsafe.Pointer(&r.data)) = syscall.RawSockaddrInet4{Family: syscall.AF_INET, Addr: address.As4()}
}

func (r *ifreq) ioctl(fd int, request uintptr) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(r))); errno != 0 {
		return errno
	}
	return nil
}

// open makes the node's device in the namespace of the calling thread, and starts its loopback.
func (n *Node) open() error {
	fd, err := syscall.Open(tunPath, syscall.O_RDWR|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return refused("opening "+tunPath, err)
	}
	device := newIfreq(deviceName)
	device.setFlags(syscall.IFF_TUN | syscall.IFF_NO_PI)
	if err := device.ioctl(fd, syscall.TUNSETIFF); err != nil {
		_ = syscall.Close(fd)
		return refused("a TUN device", err)
	}
	n.device = os.NewFile(uintptr(fd), tunPath)
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("a socket: %w", err)
	}
	defer syscall.Close(socket)
	address, err := netip.ParseAddr(n.Address)
	if err != nil {
		return err
	}
	for _, set := range []struct {
		what    string
		device  string
		request uintptr
		value   func(*ifreq)
	}{
		{"the device's address", deviceName, syscall.SIOCSIFADDR, func(r *ifreq) { r.setAddress(address) }},
		{"the device's mask", deviceName, syscall.SIOCSIFNETMASK, func(r *ifreq) { r.setAddress(netip.AddrFrom4([4]byte{255, 255, 0, 0})) }},
		{"starting the device", deviceName, syscall.SIOCSIFFLAGS, func(r *ifreq) { r.setFlags(syscall.IFF_UP | syscall.IFF_RUNNING) }},
		{"starting the loopback", "lo", syscall.SIOCSIFFLAGS, func(r *ifreq) { r.setFlags(syscall.IFF_UP | syscall.IFF_RUNNING) }},
	} {
		r := newIfreq(set.device)
		set.value(&r)
		if err := r.ioctl(socket, set.request); err != nil {
			_ = n.device.Close()
			return refused(set.what, err)
		}
	}
	return nil
}
