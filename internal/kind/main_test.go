package kind

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"postrider/internal/agent"
)

// TestMain also lets the test binary be the programs that sh is too slow or too weak for.
func TestMain(m *testing.M) {
	switch os.Getenv("POSTRIDER_TEST_PROGRAM") {
	case "":
		goleak.VerifyTestMain(m)
	case "echo":
		echo()
	case "escape":
		escape()
	case "node":
		node()
	}
}

// program is the command that runs this test binary as one of them.
func program(name string) string {
	return fmt.Sprintf("POSTRIDER_TEST_PROGRAM=%s exec '%s'", name, os.Args[0])
}

// echo answers with the state as state, the input's data as an event, and the request line as a string in another.
func echo() {
	r := bufio.NewReader(os.Stdin)
	for {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return
		}
		var q struct {
			ID, State json.RawMessage
			Input     *struct{ Data json.RawMessage }
		}
		if err := json.Unmarshal(line, &q); err != nil {
			fmt.Println(err)
			return
		}
		out := fmt.Appendf(nil, `{"id":%s,"state":%s,"events":[`, q.ID, q.State)
		if len(line) < 1<<20 {
			whole, _ := json.Marshal(string(line))
			out = fmt.Appendf(out, `{"type":"request","data":%s}`, whole)
			if q.Input != nil {
				out = fmt.Appendf(out, `,{"type":"data","data":%s}`, q.Input.Data)
			}
		}
		os.Stdout.Write(append(out, "]}\n"...))
	}
}

// escape leaves its process group, keeps the pipes, and is seen to have done so by the log line.
func escape() {
	if _, err := syscall.Setsid(); err != nil {
		fmt.Println(err)
	}
	fmt.Println(`{"log":"escaped"}`)
	<-time.After(4 * time.Second)
}

// node hosts an agent and waits to be killed in the middle of a step.
func node() {
	e := NewExec("a", os.Getenv("NODE_COMMAND"), ExecOptions{})
	_, err := e.Step(context.Background(), agent.Step{})
	fmt.Println(err)
}
