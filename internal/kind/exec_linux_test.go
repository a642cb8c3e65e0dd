package kind

import (
	"bufio"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// The agent neither reads nor minds its stdin: only the kernel can tell it that the node is dead.
func TestAKilledNodeLeavesNoAgentBehind(t *testing.T) {
	hold := newHolder(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "POSTRIDER_TEST_PROGRAM=node", "HOLD="+hold.path, "NODE_COMMAND="+odd("silent"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := hold.r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	line := waitHeld(t, hold)
	if line != "held\n" {
		t.Errorf("read %q", line)
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if b, err := bufio.NewReader(hold.r).ReadByte(); err == nil || os.IsTimeout(err) {
		t.Errorf("the agent lives on: %q, %v", b, err)
	}
}

// waitHeld reads the first line of the fifo. Before anybody opened it, it reads as ended.
func waitHeld(t *testing.T, h holder) string {
	t.Helper()
	b := make([]byte, 5)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if n, err := h.r.Read(b); n > 0 || os.IsTimeout(err) {
			return string(b[:n])
		}
	}
	return ""
}
