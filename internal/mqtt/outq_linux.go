package mqtt

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// sendQueue returns how many written bytes the other side has not confirmed at TCP level, or -1 when unknown. A number
// that falls is progress that neither a write nor a read shows.
func sendQueue(c syscall.Conn) int {
	rc, err := c.SyscallConn()
	if err != nil {
		return -1
	}
	n, ioctl := -1, error(nil)
	if err := rc.Control(func(fd uintptr) { n, ioctl = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); err != nil || ioctl != nil {
		return -1
	}
	return n
}
