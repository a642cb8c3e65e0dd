//go:build faults

package kind

import "testing"

func TestPythonCounterCounts(t *testing.T) {
	testCounter(t, newHost(t, "exec python3 ../../testdata/agents/counter.py", ExecOptions{}))
	testCounter(t, newHost(t, "../../testdata/agents/counter.py", ExecOptions{}))
}
