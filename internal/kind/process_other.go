//go:build !linux

package kind

import "syscall"

// procAttr puts a child into its own group. Without Linux's death signal, an agent learns of a killed node by the end of
// its stdin only.
func procAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
