package main

import (
	"math"
	"math/rand/v2"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas64"
	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/mat"
	"gonum.org/v1/gonum/stat/distuv"
)

// banditDim is the number of features of a decision.
const banditDim = 9

type banditVector [banditDim]float64

// The factorization of A is tried with jitter on its diagonal, each time ten
// times as much; when even the most of it does not help, A's eigenvalues are
// raised to a floor instead.
const (
	banditJitter      = 1e-9
	banditJitterMost  = 1e-3
	banditEigenvalues = 1e-10
)

// linearBandit is a Bayesian linear model of the reward, given the features x of
// a decision: weights have the mean A⁻¹b and the covariance v²A⁻¹.
type linearBandit struct {
	a *mat.SymDense
	b banditVector

	factored bool         // all below fits a and b
	chol     mat.Cholesky // of a and jitter: LLᵀ
	eigen    *banditEigen // in its place where that fails
	half     banditVector // L⁻¹b
}

// banditEigen is the eigen-decomposition of A, with raised eigenvalues.
type banditEigen struct {
	values  []float64
	vectors mat.Dense // a column each
}

// banditPrior is what is believed before anything is known: weights of the mean
// theta and the variance v²/lambda each.
type banditPrior struct {
	lambda float64
	theta  banditVector
}

func newLinearBandit(prior *banditPrior) *linearBandit {
	l := &linearBandit{a: mat.NewSymDense(banditDim, nil)}
	l.forget(0, prior)
	return l
}

// forget lets all that was learned count keep times as much, 0 to 1, and the
// prior the rest.
func (l *linearBandit) forget(keep float64, prior *banditPrior) {
	if keep == 1 {
		return
	}
	ridge := (1 - keep) * prior.lambda
	a := l.a.RawSymmetric()
	for i := range banditDim {
		row := a.Data[i*a.Stride:]
		for j := i; j < banditDim; j++ {
			row[j] *= keep
		}
		row[i] += ridge
		l.b[i] = keep*l.b[i] + ridge*prior.theta[i]
	}
	l.factored = false
}

// learn takes in the reward of a decision.
func (l *linearBandit) learn(x *banditVector, reward float64) {
	a := l.a.RawSymmetric()
	for i := range banditDim {
		row := a.Data[i*a.Stride:]
		for j := i; j < banditDim; j++ {
			row[j] += x[i] * x[j]
		}
		l.b[i] += reward * x[i]
	}
	l.factored = false
}

// sample returns θᵀx for weights θ drawn with the standard normal draws z.
func (l *linearBandit) sample(x, z *banditVector, v float64) float64 {
	if !l.factored {
		l.factor()
	}
	if e := l.eigen; e != nil {
		sum := 0.0
		for k, value := range e.values {
			along, b := 0.0, 0.0
			for i := range banditDim {
				along += e.vectors.At(i, k) * x[i]
				b += e.vectors.At(i, k) * l.b[i]
			}
			sum += along * (b/value + v*z[k]/math.Sqrt(value))
		}
		return sum
	}
	// θ = L⁻ᵀ(L⁻¹b + v·z), so θᵀx = (L⁻¹b + v·z)ᵀ(L⁻¹x).
	u := *x
	l.solveL(&u)
	sum := 0.0
	for i := range banditDim {
		sum += (l.half[i] + v*z[i]) * u[i]
	}
	return sum
}

// solveL replaces x by L⁻¹x.
func (l *linearBandit) solveL(x *banditVector) {
	blas64.Trsv(blas.Trans, l.chol.RawU().(*mat.TriDense).RawTriangular(), blas64.Vector{N: banditDim, Data: x[:], Inc: 1})
}

func (l *linearBandit) factor() {
	l.factored, l.eigen = true, nil
	a := mat.NewSymDense(banditDim, nil)
	for jitter := banditJitter; jitter <= banditJitterMost; jitter *= 10 {
		a.CopySym(l.a)
		for i := range banditDim {
			a.SetSym(i, i, a.At(i, i)+jitter)
		}
		if l.chol.Factorize(a) {
			l.half = l.b
			l.solveL(&l.half)
			return
		}
	}
	var eigen mat.EigenSym
	l.eigen = &banditEigen{values: make([]float64, banditDim)}
	if !eigen.Factorize(l.a, true) { // not finite: every sample will be NaN
		floats.AddConst(math.NaN(), l.eigen.values)
		l.eigen.vectors = *mat.NewDense(banditDim, banditDim, nil)
		return
	}
	eigen.Values(l.eigen.values)
	for i, value := range l.eigen.values {
		l.eigen.values[i] = max(value, banditEigenvalues)
	}
	eigen.VectorsTo(&l.eigen.vectors)
}

// betaBandit is what is believed of a worker's mean reward: a beta
// distribution, flat at first.
type betaBandit struct{ alpha, beta float64 }

func newBetaBandit() betaBandit { return betaBandit{1, 1} }

// forget lets all that was learned count keep times as much, 0 to 1.
func (b *betaBandit) forget(keep float64) {
	b.alpha, b.beta = 1+keep*(b.alpha-1), 1+keep*(b.beta-1)
}

// learn takes in a reward from 0 to 1.
func (b *betaBandit) learn(reward float64) {
	b.alpha += reward
	b.beta += 1 - reward
}

func (b betaBandit) sample(random *rand.Rand) float64 {
	return distuv.Beta{Alpha: b.alpha, Beta: b.beta, Src: random}.Rand()
}

// softmaxOf turns scores into chances, even ones where that cannot be done.
func softmaxOf(chances, scores []float64, temperature float64) []float64 {
	chances = chances[:0]
	highest, sum := floats.Max(scores), 0.0
	for _, s := range scores {
		chances = append(chances, math.Exp((s-highest)/max(1e-6, temperature)))
		sum += chances[len(chances)-1]
	}
	for i := range chances {
		chances[i] /= sum
		if !(sum > 0) || math.IsInf(sum, 1) {
			chances[i] = 1 / float64(len(scores))
		}
	}
	return chances
}

// drawFrom returns the index that a uniform draw from 0 to 1 falls on; 0 where
// rounding leaves none.
func drawFrom(chances []float64, draw float64) int {
	sum := 0.0
	for i, chance := range chances {
		if sum += chance; draw <= sum {
			return i
		}
	}
	return 0
}
