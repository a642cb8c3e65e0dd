package kind

import "syscall"

// procAttr puts a child into its own group, and has the kernel end it when the node is killed: an agent that ignores the
// end of its stdin would go on otherwise. Safe only from a thread that outlives the child; supervise sees to that. It
// reaches the child itself (sh, or what sh execs), not its children, which have the end of stdin.
func procAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
