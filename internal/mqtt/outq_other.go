//go:build !linux

package mqtt

import "syscall"

// sendQueue is not known here: progress is what a write or a read shows.
func sendQueue(syscall.Conn) int { return -1 }
