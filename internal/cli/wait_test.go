package cli

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"postrider/executor"
)

func TestTraceparentIsTakenOrIgnored(t *testing.T) {
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for given, want := range map[string]string{
		good: good, "": "", good + "-x": "", "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01": "", good[:54]: "", "x" + good: "", good + "\n": "",
		"00-00000000000000000000000000000000-b7ad6b7169203331-01": "", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01": "",
		"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01": "",
	} {
		if got := traceparent(given); got != want {
			t.Errorf("%q: %q, want %q", given, got, want)
		}
	}
}

// Data stands in JSON output as it came, or in base64, and nowhere in between.
func TestPayloadIsAsItCame(t *testing.T) {
	for data, want := range map[string]string{
		`{"a": 9007199254740993, "b": 0.10}`: `{"data":{"a": 9007199254740993, "b": 0.10}}`, "ON": `{"data_base64":"T04="}`, "": `{"data_base64":""}`,
		"\"\xff\"": `{"data_base64":"Iv8i"}`, `"\ud800"`: `{"data":"\ud800"}`,
	} {
		if got := string(object(payload([]byte(data))...)); got != want {
			t.Errorf("%q: %s, want %s", data, got, want)
		}
	}
	if got := string(array(nil)) + string(array([][]byte{[]byte("1"), []byte("{}")})); got != "[][1,{}]" {
		t.Errorf("arrays: %s", got)
	}
}

func TestStuckSaysWhereAndWhy(t *testing.T) {
	for want, in := range map[string]executor.InputInfo{
		"x is not consumed after 1s: pending":                                                                              {State: executor.InputPending},
		"x is not consumed after 1s: pending, its run is paused at input 3":                                                {State: executor.InputPending, Reason: "its run is paused at input 3"},
		"x is not consumed after 1s: waiting until 1970-01-01T00:00:01.000000Z":                                            {State: executor.InputWaiting, DueUS: 1e6},
		"x is not consumed after 1s: unhosted, agent a is not hosted here":                                                 {State: executor.InputUnhosted, Reason: "agent a is not hosted here"},
		"x is not consumed after 1s: pending, failed 2 times, next try at 1970-01-01T00:00:01.000000Z: boom":               {State: executor.InputPending, Attempts: 2, NextUS: 1e6, LastError: "boom"},
		"x is not consumed after 1s: pending, failed 2 times, next try at 1970-01-01T00:00:02.000000Z: no such file or so": {State: executor.InputPending, Attempts: 2, NextUS: 2e6, LastError: "agent a, step 1 of d/r: no such file or so"},
		"x is not consumed after 1s: running":                                                                              {State: executor.InputRunning},
	} {
		err := stuck("x", &in, time.Second)
		if err.Error() != want || !errors.Is(err, context.DeadlineExceeded) || HintOf(err) == "" || strings.Contains(err.Error(), "deadline") {
			t.Errorf("%v (hint %q), want %s", err, HintOf(err), want)
		}
	}
}
