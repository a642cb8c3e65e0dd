package kind

import (
	"context"
	"encoding/json"
	"fmt"

	"postrider/internal/agent"
)

// counter is go:counter, the smallest useful agent and the one to copy. It counts its inputs. All it remembers is in the
// state it is given and returns, so one value serves every run at once, and a step that is asked again answers the same.
type counter struct{}

func (counter) Step(_ context.Context, s agent.Step) (agent.Effects, error) {
	var state struct {
		N int64 `json:"n"`
	}
	// Before the first step the state is null, which leaves N at 0.
	if err := json.Unmarshal(s.State, &state); err != nil {
		return agent.Effects{}, fmt.Errorf("read own state: %w", err)
	}
	n := fmt.Appendf(nil, `{"n":%d}`, state.N+1)
	return agent.Effects{
		State:  n,
		Events: []agent.Event{{Type: "counted", Data: n}},
	}, nil
}
