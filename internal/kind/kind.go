// Package kind hosts agents. A kind is a way to run code behind the agent.Agent interface: go (compiled in) or exec (child
// processes that speak JSON lines). It knows nothing of stores and brokers.
package kind

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"postrider/internal/agent"
)

// Hosted is an agent together with what hosts it. Close ends the hosting and returns when nothing of it is left; the
// end of ctx makes it impatient, not incomplete. Steps in hand at that time may fail, later ones do.
type Hosted interface {
	agent.Agent
	Close(ctx context.Context) error
}

// builtin holds the agents of kind go. To have another one compiled in, write it like counter.go and name it here.
var builtin = map[string]func() agent.Agent{
	"counter": func() agent.Agent { return counter{} },
}

var validName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// ParseSpec splits what --agent takes: NAME=KIND:SPEC.
func ParseSpec(s string) (name, kind, spec string, err error) {
	name, rest, ok := strings.Cut(s, "=")
	if !ok {
		return "", "", "", fmt.Errorf("agent %q: want NAME=KIND:SPEC, such as counter=exec:./counter.py", s)
	}
	if !validName.MatchString(name) {
		return "", "", "", fmt.Errorf("agent %q: the name %q is not 1 to 64 of A-Z a-z 0-9 _ -", s, name)
	}
	kind, spec, ok = strings.Cut(rest, ":")
	if !ok || kind == "" || strings.TrimSpace(spec) == "" {
		return "", "", "", fmt.Errorf("agent %q: want NAME=KIND:SPEC, such as counter=exec:./counter.py", s)
	}
	return name, kind, spec, nil
}

// New hosts the agent that ParseSpec read. Nothing runs before the first step. ErrNoProgram: nothing could.
func New(kind, name, spec string, o ExecOptions) (Hosted, error) {
	switch kind {
	case "exec":
		if err := find(spec); err != nil {
			return nil, fmt.Errorf("agent %s: %w", name, err)
		}
		return NewExec(name, spec, o), nil
	case "go":
		if newAgent, ok := builtin[spec]; ok {
			return goHost{newAgent()}, nil
		}
		return nil, fmt.Errorf("agent %s: no Go agent %q; there is %s", name, spec,
			strings.Join(slices.Sorted(maps.Keys(builtin)), ", "))
	}
	return nil, fmt.Errorf("agent %s: unknown kind %q; there are exec and go", name, kind)
}

// goHost runs an agent in this process, where a panic of one step must not end every other run.
type goHost struct{ agent.Agent }

func (h goHost) Step(ctx context.Context, s agent.Step) (eff agent.Effects, err error) {
	defer func() {
		if v := recover(); v != nil {
			eff, err = agent.Effects{}, fmt.Errorf("agent %s, step %s: panic: %v", s.Agent, s.ID(), v)
		}
	}()
	return h.Agent.Step(ctx, s)
}

func (goHost) Close(context.Context) error { return nil }
